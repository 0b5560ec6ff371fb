"""The language of a token file's lines: what is printed is read back, and anything else is refused with a reason."""

from __future__ import annotations

import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from mqfs.errors import BadCommand, BadConfig
from mqfs.model import SCOPES
from mqfs.net import tokens
from mqfs.net.tokens import is_token
from mqfs.syntax.lines import TokenLine, digest, id_of, new_secret, parse_line, print_line

NAMES = st.text(st.characters(exclude_categories=("C", "Zl", "Zp"), exclude_characters="/"), min_size=1, max_size=20)
LINES = st.builds(
    TokenLine,
    NAMES,
    st.from_regex(r"\A[0-9A-Za-z]{1,32}\Z"),
    st.binary(min_size=32, max_size=32),
    st.sampled_from(list(SCOPES)),
    st.lists(NAMES.filter(lambda name: name not in (".", "..")), max_size=6).map(tuple),
    st.one_of(st.just(math.inf), st.integers(0, 253_402_300_799).map(float)),
    st.one_of(st.just(""), NAMES),
)
HASH = "sha256:a1:" + "0" * 64


@given(LINES)
def test_what_is_printed_is_read_back(line: TokenLine) -> None:
    text = print_line(line)
    assert "\n" not in text
    assert parse_line(text) == line


@example(line=b"\x1c")
@given(line=st.binary(max_size=200).map(lambda data: data.replace(b"\n", b" ")))
def test_any_line_is_a_token_or_refused_with_its_number(tmp_path_factory: pytest.TempPathFactory, line: bytes) -> None:
    for data in (line, b"0 sha256:" + line, b"0 " + HASH.encode() + b" " + line):
        file = tmp_path_factory.getbasetemp() / "any-tokens"
        file.touch(0o600)
        file.write_bytes(b"# first\n" + data)
        why = refusal(str(file))
        assert not why or f"{file}, line " in why


def refusal(file: str) -> str:
    """Why a file is refused; "" where it is not."""
    try:
        tokens.read_entries(file)
    except BadConfig as error:
        return str(error)
    return ""


REFUSED = [
    ("sha256:a1", "malformed hash (expected sha256:ID:HEX, 64 digits)"),
    ("sha256:a-1:" + "0" * 64, "malformed hash"),
    ("sha256:" + "a" * 33 + ":" + "0" * 64, "malformed hash"),
    ("sha256:a1:" + "0" * 63, "malformed hash"),
    (f"{HASH} scope=all", "scope 'all' (expected read, write, admin)"),
    (f"{HASH} scope=read scope=admin", "malformed option (expected USER sha256:ID:HEX"),
    (f"{HASH} admin", "malformed option"),
    (f"{HASH} Path=/x", "malformed option"),
    (f"{HASH} path=x", "path 'x' (expected /GROUP or /GROUP/NAME, without . and ..)"),
    (f"{HASH} path=/a/../b", "path '/a/../b' (expected"),
    (f"{HASH} path=" + "/a" * 67, "(expected /GROUP or /GROUP/NAME"),
    (f"{HASH} 'path=/a\rb'", "(expected /GROUP or /GROUP/NAME"),
    (f"{HASH} mq_the_secret", "malformed option (expected USER"),
    (f"{HASH} expires=2027-02-30", "expires '2027-02-30' (expected YYYY-MM-DD or YYYY-MM-DDTHH:MM:SSZ)"),
    (f"{HASH} expires=2027-1-1", "expires '2027-1-1' (expected"),
    (f"{HASH} expires={'9' * 5000}", "expires '999"),
    (f"{HASH} expires=２０２７-01-01", "(expected YYYY-MM-DD"),
    (f"{HASH} note='open", "quote not closed"),
]


@pytest.mark.parametrize(("words", "why"), REFUSED)
def test_each_refusal_names_what_was_expected(words: str, why: str) -> None:
    with pytest.raises(BadCommand) as caught:
        parse_line(f"0 {words}")
    assert why in caught.value.detail


def test_a_date_is_its_beginning_in_utc() -> None:
    assert parse_line(f"0 {HASH} expires=1970-01-02").expires == 86_400
    assert parse_line(f"0 {HASH} expires=1970-01-02T00:00:01Z").expires == 86_401


def test_a_new_secret_carries_its_id_and_256_random_bits() -> None:
    made, secret = new_secret()
    assert id_of(secret.encode()) == made
    assert len(secret) == len("mq_") + 8 + 1 + 43
    assert len({new_secret()[1] for _ in range(100)}) == 100
    line = TokenLine("0", made, digest(secret.encode()))
    assert parse_line(print_line(line)) == line
    assert secret.removeprefix(f"mq_{made}_") not in print_line(line)


@pytest.mark.parametrize("line", [b"", b"# 0 sha256:a1:", b"   "])
def test_lines_of_other_kinds(line: bytes) -> None:
    assert not is_token(line)
    assert is_token(b" 0\tsha256:anything")
