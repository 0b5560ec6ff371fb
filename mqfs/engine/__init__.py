"""The tree of groups and streams: synchronous, no I/O of its own, no clock; it waits for nobody."""
