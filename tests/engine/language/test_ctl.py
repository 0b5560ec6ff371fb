"""The language of ctl: what is printed can be written back, what is wrong is refused whole."""

from __future__ import annotations

import os

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mqfs import limits
from mqfs.engine.language.settings import USAGE, Depth, Settings, parse, parse_settings
from mqfs.errors import BadCommand, MqfsError, NotFound, NotPermitted, OverLimit
from mqfs.syntax.duration import parse_duration, print_duration
from mqfs.syntax.lines import quote, split
from mqfs.syntax.patterns import DOTTED, Words
from tests.support.hand import ANNA, ROOT, Hand

SETTINGS = st.builds(
    Settings,
    data=st.sampled_from(["message", "line", "coalesce"]),
    replay=st.sampled_from(["off", "last", "all"]),
    depth=st.one_of(
        st.integers(0, 10**9).map(lambda n: Depth(messages=n)), st.integers(1, 10**12).map(lambda n: Depth(size=n))
    ),
    ttl=st.integers(0, 10**9).map(lambda ms: ms * 10**6),
    full=st.sampled_from(["drop-old", "drop-new", "block", "reject"]),
    sync=st.one_of(st.sampled_from([0, -1, -2]), st.integers(1, 10**6).map(lambda ms: ms * 10**6)),
    lease=st.integers(0, 10**9).map(lambda ms: ms * 10**6),
    retries=st.integers(0, 10**9),
    backoff=st.tuples(st.integers(0, 10**6), st.integers(10**6, 10**9)).map(lambda b: (b[0] * 10**6, b[1] * 10**6)),
    dead=st.sampled_from(["dead", "letters of the dead"]),
    order=st.sampled_from(["sequence", "expiry"]),
    dedup=st.integers(0, 10**9).map(lambda ms: ms * 10**6),
    idle=st.integers(0, 10**9).map(lambda ms: ms * 10**6),
    protect=st.booleans(),
    words=st.sampled_from([DOTTED, Words("", "?", "*"), Words("#", "'", '"'), Words(".", "+", "#", "*")]),
)


@given(SETTINGS)
def test_what_is_printed_can_be_written_back(settings: Settings) -> None:
    assert parse_settings(settings.lines()) == attrs.evolve(settings, full_was_set=True)


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n\0"), min_size=1)))
def test_quoting_gives_every_word_back(words: list[str]) -> None:
    assert split(" ".join(map(quote, words))) == words


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", []),
        ("  # a comment", []),
        ("replay all # said so", ["replay", "all"]),
        ("eof 'a b'", ["eof", "a b"]),
        ("eof 'it''s'", ["eof", "it's"]),
        ("eof a#b", ["eof", "a#b"]),
        ("eof 'a'b", ["eof", "ab"]),
    ],
)
def test_words(line: str, words: list[str]) -> None:
    assert split(line) == words


@pytest.mark.parametrize(("word", "ns"), [("0", 0), ("30s", 30 * 10**9), ("5m", 300 * 10**9), ("10ms", 10**7)])
def test_durations(word: str, ns: int) -> None:
    assert parse_duration(word) == ns
    assert parse_duration(print_duration(ns)) == ns


@pytest.mark.parametrize(
    "line",
    [
        "replay sometimes", "replay", "replay all all", "Replay all", "depth many", "depth 5X", "depth -1", "ttl 5",
        "ttl 5w", "sync 0", "sync never", "full", "nonsense", "eof", "eof a b", "drop a", "drop a x", "eof 'open",
        "deliver two", "ack next", "deliver one\nack never", "data coalesce\ndeliver one",
        "deliver one\ndata coalesce", "lease 5", "retries -1", "backoff 1s", "backoff 2s 1s", "dead .x", "order age",
        "dedup soon", "bind v", "bind v a*", "bind v 'prefix:\"a\" (nosuch())'", "unbind v", "consumer",
        "consumer .c", "consumer c a later", "consumer c a backlog", "remove c", "redrive nosuch", "redrive a x",
        "idle x", "protect maybe", "ring some", "ring", "data lines", "depth 99999999999999999999",
    ],
)  # fmt: skip
def test_a_bad_line_is_refused_with_one_line_that_says_why(hand: Hand, line: str) -> None:
    before = hand.text("ctl")
    handle = hand.open("ctl", os.O_RDWR)
    with pytest.raises(MqfsError) as refused:
        handle.write(f"ttl 7s\n{line}\nttl 8s\n".encode())
    assert handle.read(4096).decode() == f"{refused.value}\n"
    assert handle.read(4096).decode() == before, "nothing of the write was done"
    named = line.split("\n")[-1].split()[0] in hand.text(".errors")
    assert named or isinstance(refused.value, NotFound)


@pytest.mark.parametrize(
    ("path", "line", "said"),
    [
        ("ctl", "depht 5", "unknown command 'depht' (did you mean 'depth'?)"),
        ("ctl", "consumer c s transint", "consumer: unknown option 'transint' (expected one of transient private"),
        (
            "ctl",
            "consumer c full blok",
            "consumer: unknown policy 'blok' (expected one of drop-old drop-new block reject",
        ),
        (".cursor", "sekk first", "unknown command 'sekk' (expected one of select cover seek"),
        (".cursor", "format jso", "unknown format 'jso' (expected one of raw line nul each json record"),
        (".consumers/w", "akc", "unknown command 'akc' (expected one of ack nack release dead touch"),
        (".txn/ctl", "comit x.1", "unknown command 'comit' (expected one of commit abort forget"),
    ],
)
def test_the_nearest_word_is_named(hand: Hand, path: str, line: str, said: str) -> None:
    hand.ctl("consumer w")
    handle = hand.tree.open(ROOT, hand.tree.find(ROOT, f"g/{path}"), os.O_RDWR)
    with pytest.raises(MqfsError) as refused:
        handle.write(line.encode() + b"\n")
    assert str(refused.value).startswith(said)
    assert "did you mean '" in str(refused.value)
    assert str(refused.value).endswith("'?)")


@pytest.mark.parametrize(
    ("verb", "least", "most"),
    [("eof", 1, 1), ("clear", 0, 1), ("drop", 2, None), ("redrive", 0, 2), ("consumer", 1, 11), ("pause", 1, 2)],
)
def test_an_action_takes_as_many_words_as_its_usage_says(verb: str, least: int, most: int | None) -> None:
    def refusal(count: int) -> str:
        with pytest.raises(BadCommand) as refused:
            parse(" ".join([verb, *["7"] * count]), Settings())
        return str(refused.value)

    for count in {least, 100 if most is None else most}:
        assert parse(" ".join([verb, *["7"] * count]), Settings())[0][1] is not None
    for count in {least - 1, least if most is None else most + 1} - {-1, least}:
        assert refusal(count) == f"{verb}: {count} values (expected {USAGE[verb]})"


@pytest.mark.parametrize(
    "command", [*(field.name for field in attrs.fields(Settings) if field.metadata), *USAGE, "x" * 1_000]
)
def test_the_whole_list_of_commands_fits_an_error(command: str) -> None:
    with pytest.raises(BadCommand) as refused:
        parse("\n" * 9_999 + f"eof a\n{command}x", Settings())
    assert str(refused.value).startswith("line 10001: unknown command ")
    assert str(refused.value).endswith("'?)" if len(command) < 100 else " ...)")


def test_of_several_lines_the_number_is_said(hand: Hand) -> None:
    for text, said in (("ttl x", "ttl: "), ("\nttl x\n", "ttl: "), ("depth 5\nttl x\n", "line 2: ttl: ")):
        with pytest.raises(BadCommand) as refused:
            hand.open("ctl", os.O_WRONLY).write(text.encode() + b"\n")
        assert str(refused.value) == f"{said}invalid duration 'x' (expected 0, 10ms, 30s, 5m, 2h or 7d)"
    for text, said in (("clear x", ""), ("depth 5\n# one\nclear x\n", "line 3: ")):
        with pytest.raises(NotFound) as missing:
            hand.open("ctl", os.O_WRONLY).write(text.encode() + b"\n")
        assert str(missing.value).startswith(f"{said}no stream 'x' in group ")


def test_a_line_without_its_newline_waits_for_the_next_write(hand: Hand) -> None:
    handle = hand.open("ctl", os.O_RDWR)
    handle.write(b"ttl 1")
    assert "ttl 0" in hand.text("ctl")
    handle.write(b"5s\n")
    assert "ttl 15s" in hand.text("ctl")
    handle.write(b"ttl 20s")
    handle.close()
    assert "ttl 20s" in hand.text("ctl"), "the last close ends the line"


def test_defaults_are_settings_only() -> None:
    with pytest.raises(BadCommand):
        parse_settings(["clear"])
    assert parse_settings(["replay all", "depth 5"]).depth == Depth(messages=5)


def test_actions_are_checked_before_the_first_is_done(hand: Hand) -> None:
    hand.stream()
    hand.write("s", b"1")
    with pytest.raises(NotFound):
        hand.ctl("clear s", "eof nobody")
    assert hand.cursor("seek first").read(64) == b"1"
    with pytest.raises(NotPermitted):
        hand.ctl("protect on", "clear s")
    assert "protect off" in hand.text("ctl")


def test_only_the_owner_writes_ctl(hand: Hand) -> None:
    with pytest.raises(MqfsError, match="cannot write 'ctl': mode 644"):
        hand.ctl("replay off", user=ANNA)
    assert "replay all" in hand.text("ctl", user=ANNA)


def test_who_may_attach_to_the_ring_is_printed_and_kept(hand: Hand) -> None:
    """The default is not in the log, as servers read it that do not know the word."""
    assert "ring owner" in hand.text("ctl").splitlines()
    assert not any("ring" in line for line in parse_settings([]).lines(given=True) if not line.startswith("keep"))
    for who in "all", "off", "owner":
        hand.ctl(f"ring {who}")
        assert f"ring {who}" in hand.text("ctl").splitlines()
        assert parse_settings(hand.group.settings.lines(given=True)).ring == who


def test_parse_tells_the_settings_in_force_at_each_line() -> None:
    steps = parse("protect on\nclear\nprotect off\nclear\n", Settings())
    assert [settings.protect for settings, _ in steps] == [True, True, False, False]


THINNED = [("drop s 2 4", "depth 3"), ("depth 3", "drop s 2 4"), ("clear t", "depth 3")]


@pytest.mark.parametrize("lines", THINNED, ids=str)
def test_a_depth_cuts_no_more_than_it_has_to(hand: Hand, lines: tuple[str, ...]) -> None:
    for name in ("s", "t"):
        hand.stream(name)
    hand.write("s", *(b"%d" % number for number in range(5)))
    hand.ctl(*lines)
    handle = hand.tree.open(ROOT, hand.tree.find(ROOT, "g/.kept/s"), os.O_RDONLY)
    assert len(bytes(handle.read(64))) == 3  # type: ignore[arg-type]


def count_changes(hand: Hand) -> int:
    """Records in the log that are no messages."""
    return len(list(hand.group.log.upkeep.history()[1]))


def test_a_bind_that_is_there_writes_nothing(hand: Hand) -> None:
    hand.ctl("bind v a", "bind v b")
    written = count_changes(hand)
    hand.ctl("bind v a", "bind v b")
    assert count_changes(hand) == written
    hand.ctl("bind v c", "bind v c")
    assert count_changes(hand) == written + 1
    hand.ctl("unbind v a", "bind v a")
    assert [*hand.group.views["v"].state.patterns] == ["b", "c", "a"]
    hand.ctl("unbind v", "bind v a")
    assert [*hand.group.views["v"].state.patterns] == ["a"]


@pytest.mark.parametrize("most", ["CONSUMERS", "DROPPED", "VIEW_PATTERNS", "PATTERNS"])
def test_a_write_is_held_to_the_limits_by_all_of_its_lines(
    hand: Hand, monkeypatch: pytest.MonkeyPatch, most: str
) -> None:
    monkeypatch.setattr(limits, most, 3)
    hand.stream()
    hand.write("s", *[b"x"] * 5)
    start = hand.group.streams["s"].kept.first_kept() + 1  # the oldest is not counted
    line, undo = {
        "CONSUMERS": ("consumer w{}", "remove w{}"),
        "DROPPED": ("drop s {}", ""),
    }.get(most, ("bind v w{}", "unbind v w{}"))
    lines = [line.format(number) for number in range(start, start + 4)]
    before = hand.text("ctl"), count_changes(hand)
    with pytest.raises(OverLimit):
        hand.open("ctl", os.O_WRONLY).write("".join(f"{text}\n" for text in lines).encode())
    assert (hand.text("ctl"), count_changes(hand)) == before
    hand.ctl(*lines[:3], *lines[:3])  # twice is once
    if undo:
        hand.ctl(undo.format(start), lines[3])  # what goes makes room
