"""The server program: options, start and stop, signals."""
