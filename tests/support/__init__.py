"""Helpers that several rooms share. Fixtures are in each folder's conftest; nothing imports from a conftest."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
