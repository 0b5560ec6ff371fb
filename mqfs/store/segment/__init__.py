"""One segment of a log: its file, its index, the recovery of its tail."""
