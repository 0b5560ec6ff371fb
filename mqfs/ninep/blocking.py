"""The public name of the blocking 9P client: client/connection.py."""

from mqfs.ninep.client.connection import Client, File, connect

__all__ = ["Client", "File", "connect"]
