"""The 9P client: a machine without I/O, and the connections that drive it."""
