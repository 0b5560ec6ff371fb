"""A tree over a memory store, by hand."""

import pytest

from tests.support.hand import Hand


@pytest.fixture
def hand() -> Hand:
    return Hand("replay all")
