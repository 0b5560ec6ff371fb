"""The ways out: named consumers, claims, dead letters."""
