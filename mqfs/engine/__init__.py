"""The tree of groups and streams: synchronous, without I/O, clock or waiting of its own."""
