"""Retention: which messages are kept, and when the log is trimmed of all others."""
