"""`mqfs bench`: producers, consumers and workers as processes of their own, every message checked."""
