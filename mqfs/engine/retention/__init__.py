"""Retention: which messages are kept, and when the others give back their room."""
