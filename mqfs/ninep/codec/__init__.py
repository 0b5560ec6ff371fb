"""Messages of 9P2000, .u and .L, and their bytes. Owns no state and does no I/O."""
