"""`mqfs bench`: real runs, small."""
