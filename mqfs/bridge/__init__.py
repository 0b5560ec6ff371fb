"""Bridges: clients that carry messages between a group and another system."""
