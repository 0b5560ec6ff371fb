"""The 9P client for programs without an event loop, by its public name; see client/connection.py."""

from mqfs.ninep.client.connection import Client, File, connect

__all__ = ["Client", "File", "connect"]
