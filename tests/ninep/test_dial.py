"""Dial strings: parsed and printed, and what is said of a bad one."""

import pytest

from mqfs.errors import BadAddress
from mqfs.ninep.dial import Tcp, Unix, loopback, parse


@pytest.mark.parametrize("text", ["unix!/tmp/9p", "unix!relative", "unix!/with!mark", "tcp!127.0.0.1!564", "tcp!::1!0"])
def test_inverse(text: str) -> None:
    assert str(parse(text)) == text


def test_parts() -> None:
    assert parse("unix!/a!b") == Unix("/a!b")
    assert parse("tcp!localhost!65535") == Tcp("localhost", 65_535)
    assert parse("tcp!localhost") == Tcp("localhost", 564)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "unix!PATH or tcp!HOST!PORT is right"),
        ("/tmp/9p", "unix!PATH or tcp!HOST!PORT is right"),
        ("unix!", "has no path"),
        ("unix!" + "x" * 108, "at most 107 bytes"),
        ("tcp!", "has no host"),
        ("tcp!!5640", "has no host"),
        ("tcp!localhost!http", "'http' is not a port"),
        ("tcp!localhost!65536", "'65536' is not a port"),
        ("tcp!localhost!-1", "'-1' is not a port"),
    ],
)
def test_refused(text: str, why: str) -> None:
    with pytest.raises(BadAddress, match=why):
        parse(text)


def test_loopback() -> None:
    assert all(map(loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(loopback, ("0.0.0.0", "::", "192.168.1.1", "example.org", "")))
