"""A group whose log a real server cannot open at its start: only what may be meant by its name is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from mqfs.errors import DiskFailed, Exists
from mqfs.ninep.client.connection import Client, connect
from tests.support.eventually import eventually
from tests.support.server import Server

pytestmark = pytest.mark.process
HIDDEN = 4  # the number of orders/eu


def change_groups(client: Client, path: str) -> None:
    """Make, rename and remove groups there."""
    client.mkdir(f"{path}made")
    client.rename(f"{path}made", "uk")
    client.remove(f"{path}uk")


def test_a_group_that_cannot_be_opened(tmp_path: Path) -> None:
    """Its name and parent are not known: it may be in any group that is older, and in no other."""
    with Server.at(tmp_path) as server:
        with connect(server.address) as client:
            for path in ("orders", "orders/old", "orders/eu", "shop", "shop/eu"):
                client.mkdir(path)
            client.create("orders/eu/s").close()
        server.stop()
        (log,) = (server.store / "buckets" / f"{HIDDEN:02x}" / f"{HIDDEN}").glob("*.log")
        log.rename(tmp_path / "aside")
        log.mkdir()
        server.start()
        with connect(server.address) as client:
            change_groups(client, "shop/")
            client.remove("shop/eu")
            client.create("orders/stream").close()
            for path in ("", "orders/", "orders/old/"):
                with pytest.raises(DiskFailed):
                    client.mkdir(f"{path}uk")
            with pytest.raises(DiskFailed):
                client.rename("shop", "uk")
            with pytest.raises(DiskFailed):
                client.remove("orders/old")
            with pytest.raises(Exists):
                client.mkdir("shop")
            log.rmdir()
            (tmp_path / "aside").rename(log)
            eventually(lambda: "eu" in client.list("orders"), "its log can be opened")
            assert "s" in client.list("orders/eu")
            change_groups(client, "")
