"""The nodes of a group that are no streams, views or consumers: its own files and directories, and those of `.txn`."""
