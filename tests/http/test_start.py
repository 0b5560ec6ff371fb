"""Starting with `--http`: what is missing, and addresses that cannot be."""

from __future__ import annotations

import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.support.eventually import HANG_S
from tests.support.server import Server, environment, mqfs, short_folder

WITHOUT = "import sys; sys.modules['httptools'] = None; from mqfs.cli.main import main; main()"


@pytest.mark.parametrize("option", ["--http tcp!127.0.0.1!0", "--http-ntfy g=tcp!127.0.0.1!0", "--fq tcp!127.0.0.1!0"])
def test_without_the_parser_it_says_what_to_install(tmp_path: Path, option: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "serve", *option.split()],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )
    assert done.returncode == 2
    assert f" {option.split()[0]}: " in done.stderr
    assert "pip install httptools" in done.stderr


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
