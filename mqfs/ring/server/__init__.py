"""Rings in the server: who may attach, and how what is published comes into the log (docs/explanation/ring.md)."""
