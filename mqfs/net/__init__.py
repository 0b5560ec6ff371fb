"""Addresses, users, tokens and sockets in the file system. Imports no protocol."""
