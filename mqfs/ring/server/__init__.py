"""Rings in the server: who attaches to them, and how what is published comes into the log (doc/ring.md)."""
