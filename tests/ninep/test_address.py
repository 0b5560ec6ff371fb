"""Dial strings: parsed and printed, and the errors of bad ones."""

import pytest

from mqfs.errors import BadAddress
from mqfs.net.sockets import TcpAddress, TlsAddress, UnixAddress, is_loopback, parse_address


@pytest.mark.parametrize(
    "text", ["unix!/tmp/9p", "unix!relative", "unix!/with!mark", "tcp!127.0.0.1!564", "tcp!::1!0", "tls!a!1"]
)
def test_inverse(text: str) -> None:
    assert str(parse_address(text)) == text


def test_parts() -> None:
    assert parse_address("unix!/a!b") == UnixAddress("/a!b")
    assert parse_address("tcp!localhost!65535") == TcpAddress("localhost", 65_535)
    assert parse_address("tcp!localhost") == TcpAddress("localhost", 564)
    assert parse_address("tls!localhost") == TlsAddress("localhost", 564)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "expected unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"),
        ("/tmp/9p", "expected unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT"),
        ("unix!", "no path"),
        ("unix!" + "x" * 108, "at most 107 bytes"),
        ("tcp!", "no host"),
        ("tcp!!5640", "no host"),
        ("tcp!localhost!http", "'http' is not a port"),
        ("tcp!localhost!65536", "'65536' is not a port"),
        ("tcp!localhost!" + "9" * 5_000, "is not a port"),
        ("tcp!localhost!-1", "'-1' is not a port"),
        ("tls!!5640", "no host"),
    ],
)
def test_refused(text: str, why: str) -> None:
    with pytest.raises(BadAddress, match=why):
        parse_address(text)


@pytest.mark.parametrize(
    ("text", "plain"),
    [
        ("unix:/run/m.sock", "unix!/run/m.sock"),
        ("unix:///run/m.sock", "unix!/run/m.sock"),
        ("unix://m.sock", "unix!m.sock"),
        ("unix:a!b", "unix!a!b"),
        ("tcp://host:5640", "tcp!host!5640"),
        ("tcp://host:5640/", "tcp!host!5640"),
        ("tcp://host", "tcp!host!564"),
        ("tls://[::1]:5640", "tls!::1!5640"),
        ("127.0.0.1:5640", "tcp!127.0.0.1!5640"),
        ("[::1]:5640", "tcp!::1!5640"),
    ],
)
def test_other_forms(text: str, plain: str) -> None:
    assert str(parse_address(text)) == plain


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("http://host:80", "unknown network"),
        ("unix:", "no path"),
        ("tcp://:5640", "host ':5640'"),
        ("tcp://a/b:1", r"host 'a/b:1' \(expected HOST:PORT"),
        ("tls://::1:5640", r"host '::1:5640' \(expected HOST:PORT, or \[IPV6\]:PORT\)"),
        ("host:http", "'http' is not a port"),
        ("host:65536", "'65536' is not a port"),
        ("host", "unknown network"),
    ],
)
def test_other_forms_refused(text: str, why: str) -> None:
    with pytest.raises(BadAddress, match=why):
        parse_address(text)


def test_loopback() -> None:
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.9.9.9", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.1", "example.org", "")))
