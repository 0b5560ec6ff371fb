"""Message queues as files: directories are groups, files are streams, plain read and write is the API."""

__version__ = "0.1.0"
