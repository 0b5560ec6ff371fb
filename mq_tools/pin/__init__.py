"""pin(1): programs on a terminal that outlives the one they were started from, using files only."""
