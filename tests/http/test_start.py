"""Starting with `--http`: addresses, and those that cannot be."""

from __future__ import annotations

import re
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from mqfs import connect, errors
from tests.http.web import Web
from tests.support.eventually import HANG_S
from tests.support.server import Server, mqfs, short_folder


@pytest.mark.parametrize("address", ["http://localhost", "tcp!", "tcp!localhost!x"])
def test_what_is_no_address(tmp_path: Path, address: str) -> None:
    done = mqfs("serve", "--http", address, cwd=tmp_path)
    assert (done.returncode, "--http" in done.stderr) == (2, True)


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_an_address_as_clients_write_it(host: str) -> None:
    """And the server says where a browser finds it, and who may write there."""
    with short_folder() as folder, Server.at(folder, "--http", f"{host}:0", "--http-ntfy", f"n={host}:0") as server:
        urls = re.findall(rf"at tcp!{host}!\d+ \((http://{host}:\d+/(?:\.web/)?)\)", server.text())
        page, _ = urls
        assert b"<html" in urllib.request.urlopen(page, timeout=HANG_S).read()
        root = page.removesuffix(".web/")
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(urllib.request.Request(root + "a/", method="PUT"), timeout=HANG_S)
        assert "'nobody': see --tcp-user and --token-file" in caught.value.read().decode()


def test_beyond_loopback_only_by_consent(tmp_path: Path) -> None:
    done = mqfs("serve", "--http", "tcp!0.0.0.0!0", cwd=tmp_path)
    assert (done.returncode, "--insecure" in done.stderr) == (1, True)


def test_a_client_of_9p_is_told_that_it_has_the_wrong_port(web: Web) -> None:
    with pytest.raises(errors.Disconnected, match=r"answers in HTTP \(expected a 9P server\)$"):
        connect(f"tcp!127.0.0.1!{web.port}")
