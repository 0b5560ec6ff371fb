"""`mqfs bench`: what this machine does with messages; producers, consumers and workers as processes, every message checked."""
