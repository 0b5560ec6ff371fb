"""The ways in: a write, a batch, a transaction, a delayed message, what a ring took."""
