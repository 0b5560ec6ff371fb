"""The tree of names: groups, streams and other files are found, made and removed; start and maintenance."""
