"""A group over either store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.batches import Units


@pytest.fixture(params=["memory", "disk"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Makes a group with those settings, over either store."""

    def make(*lines: str) -> Units:
        return Units(*lines, path=tmp_path / "store" if request.param == "disk" else None)

    return make
