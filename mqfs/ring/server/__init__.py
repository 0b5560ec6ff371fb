"""Rings in the server: who may attach, and how published messages get into the log (docs/explanation/ring.md)."""
