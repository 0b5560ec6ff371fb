"""Open files: what a read or a write of each kind of file in the tree does."""
