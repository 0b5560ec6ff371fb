"""Two moments of the campaign of kills; `make soak` does thirty with a million messages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.spark import kills
from tests.support import campaign
from tests.support.java import java
from tests.support.server import short_folder


@pytest.mark.timeout(3_600)
def test_kills() -> None:
    if why := java():
        pytest.skip(why)
    moments = 30 if campaign.whole() else 2
    victims = ["all", "server", "worker", "jvm"]
    with short_folder() as folder:
        messages = 1_000_000 if campaign.whole() else 6_000
        killed = kills.run(Path(folder), messages, [victims[n % 4] for n in range(moments)], campaign.seed())
    assert sum(killed.values()) == moments
