"""The log of one group with its one writer, and what all boxes of the engine use: alarms, portions, faults."""
