"""One segment of a log: its file, its index, what is found in a torn tail."""
