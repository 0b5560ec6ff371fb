"""Rings in the server: the shared memory by which library clients of this machine publish and follow (doc/ring.md)."""
