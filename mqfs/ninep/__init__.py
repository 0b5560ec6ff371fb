"""9P: bytes and messages (codec), the client and the server. The machines do no I/O; a driver on each side does."""
