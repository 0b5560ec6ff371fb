"""Which messages a reader is for: patterns, programs, views, seek."""
