"""The common part of all front ends: accepted connections, socket streams, fairness between users, waiting."""
