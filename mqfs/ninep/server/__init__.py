"""The server: sessions without I/O, and the connections that drive them."""
