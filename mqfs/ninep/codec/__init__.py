"""Messages of 9P2000, .u and .L, and their bytes. Has no state and does no I/O."""
