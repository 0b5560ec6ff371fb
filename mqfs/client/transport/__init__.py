"""The ways to a tree: 9P, the engine in this process, shared memory."""
