"""9P: the protocol machines (no I/O), and the server and clients that drive them."""
