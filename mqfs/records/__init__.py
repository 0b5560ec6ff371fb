"""The format of a log: records, batches of them, their columns. No state, no I/O."""
