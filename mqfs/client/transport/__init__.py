"""The transports: 9P, an embedded engine, shared memory."""
