"""The tree of names: groups, streams and the files beside them, found, made, removed; start and maintenance."""
