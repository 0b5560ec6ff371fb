"""The log of one group with its one writer, and the parts that all of the engine uses: alarms, portions, faults."""
