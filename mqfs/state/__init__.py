"""The state of a group and of its messages, as values."""
