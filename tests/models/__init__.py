"""What the tree does, in lists and dicts, and the machines of hypothesis that compare it with the engine."""
