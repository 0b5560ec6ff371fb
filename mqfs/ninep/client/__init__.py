"""The client: a machine without I/O, and a connection that drives it."""
