"""The log of one group as the engine sees it: its clock, bodies in parts."""
