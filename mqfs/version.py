"""The version, for what may not import the whole library."""

__version__ = "0.2.0"
