"""Publishing: writes, batches, transactions, delayed messages, and messages from a ring."""
