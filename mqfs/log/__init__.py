"""The format of a log: records, batches of them, their columns. Owns no state and never does I/O."""
