"""Words to values and back, for engine, client and command line. Holds no state."""
