"""Helpers of several folders of tests. Fixtures are in the conftest of each folder; nothing imports from a conftest."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
