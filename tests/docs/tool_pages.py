"""What must come of the examples of the tools' pages."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

from tests.docs.pages import Block
from tests.docs.scene import Scene
from tests.docs.treated import prepared, treated
from tests.support.eventually import eventually
from tests.support.tools import mq_cat, opened

KEY = "\x1c"  # Ctrl-\

# ---------------------------------------------------------------- mq-cat(1)


@prepared("mq-cat.1")
def a_room(at: Scene) -> None:
    at.serve()
    room = at.group("room", "replay all")
    at.group("cron", "data line")
    for number in range(12):
        (room / ("bob" if number % 3 else "alice")).write_text(f"line {number}\n")


@treated("mq-cat.1", "mq-cat --from first")
def follow_everything(at: Scene, block: Block) -> None:
    at.typing.begin(block.text)
    at.typing.shows(*(f"line {number}" for number in range(12)))
    (at.mount / "room" / "carol").write_text("hello\n")
    at.typing.shows("hello")
    at.typing.interrupt()
    assert at.typing.code == 130


@treated("mq-cat.1", "mq-cat -e -t --from -10")
def the_last_ten_with_their_times(at: Scene, block: Block) -> None:
    said = at.type(block.text)
    rows = [re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d+\+00:00 (\w+) line (\d+)", row) for row in said]
    wanted = [("bob" if number % 3 else "alice", str(number)) for number in range(2, 12)]
    assert [row.groups() for row in rows if row] == wanted


@treated("mq-cat.1", "mq-cat -e --from -15m")
def what_was_logged_lately(at: Scene, block: Block) -> None:
    assert at.type(block.text) == []
    (at.mount / "cron" / "ctl").write_text("replay all\n")
    (at.mount / "cron" / "backup").write_text("began\nended\n")
    assert at.type(block.text) == ["began", "ended"]


@treated("mq-cat.1", "mq-cat -n 1 --idle 1m")
def at_most_a_minute(at: Scene, block: Block) -> None:
    at.typing.begin(block.text)
    eventually(opened(at.mount / "room", ".cursor"), "the reader")
    alice = at.mount / "room" / "alice"
    # It may not have gone to the end yet; then the next one is its one message.
    eventually(lambda: alice.write_text("here\n") > 0 and at.typing.prompted(0.2), "the one message")
    assert (at.typing.said, at.typing.code) == (["here"], 0)
    assert at.type(block.text.replace("1m", "0.1")) == ["silence"]


@treated("mq-cat.1", "mq-cat -e --from first --json")
def count_what_each_stream_has(at: Scene, block: Block) -> None:
    streams = json.loads((at.mount / "room" / ".stats").read_text())["streams"]
    wanted = [[str(streams[name]["messages"]), name] for name in ("alice", "bob", "carol")]
    assert [row.split() for row in at.type(block.text)] == wanted


@treated("mq-cat.1", "mq-cat -n 2 --consumer mailer")
def take_two_from_a_consumer_for_good(at: Scene, block: Block) -> None:
    jobs = at.group("jobs", "replay all")
    (jobs / "mail").touch()
    (jobs / ".consumers" / "mailer").touch()
    for name in ("ann", "bob", "eve", "joe"):
        (jobs / "mail").write_text(f"{name}\n")
    assert at.type(block.text) == ["ann", "bob"]
    assert at.type(block.text) == ["eve", "joe"]


@treated("mq-cat.1", "mq-cat -f each mq/room alice")
def pass_on_what_is_said(at: Scene, block: Block) -> None:
    at.group("archive", "replay all")
    whole = ("-e", "--from", "first", "--json")

    def bodies(*of: object) -> list[str]:
        return [json.loads(row)["body"] for row in mq_cat(*whole, *of).stdout.splitlines()]

    at.typing.begin(block.text)
    eventually((at.mount / "archive" / "alice").exists, "the archive")
    (at.mount / "room" / "alice").write_text("two\nlines\n")
    said = bodies(at.mount / "room", "alice")
    eventually(lambda: bodies(at.mount / "archive") == said, "the same messages there")
    at.typing.interrupt()
    assert at.typing.code == 130


# ---------------------------------------------------------------- mq-work(1)


@treated("mq-work.1", "mkdir mq/jobs")
def a_worker_that_ends_when_there_is_none_left(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mq-work.1", "echo 'one; two'")
def the_message_as_an_argument(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mq-work.1", "mq-work -j 8 --rate 100/m")
def eight_at_a_time(at: Scene, block: Block) -> None:
    program = at.folder / "send-mail"
    program.write_text("#!/bin/sh\ncat >>sent; sleep 0.1\n")
    program.chmod(0o755)
    for number in range(4):
        (at.mount / "jobs" / "mail").write_text(f"letter {number}\n")
    at.typing.begin(block.text)
    sent = at.folder / "sent"
    eventually(lambda: sent.exists() and len(sent.read_text().splitlines()) == 4, "all are sent")
    at.typing.interrupt()
    assert sorted(sent.read_text().splitlines()) == [f"letter {number}" for number in range(4)]
    assert at.type("mq-work -e mq/jobs/.consumers/mailer -- echo not yet done:") == []


@treated("mq-work.1", "echo nonsense")
def give_up_at_once(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mq-work.1", "mkdir mq/post")
def from_a_stream(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mq-work.1", "mq put mq/jobs/mail -H lang=de")
def what_a_command_finds(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


# ---------------------------------------------------------------- mq(1)


@treated("mq.1", "mkdir mq/jobs")
def later_and_first(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mq.1", "head -n 1 <>mq/jobs/mail")
def served_by_priority(at: Scene, block: Block) -> None:
    at.type_as_shown(block)


@treated("mq.1", "mq put -l mq/jobs/mail <addresses")
def a_line_a_message(at: Scene, block: Block) -> None:
    (at.folder / "addresses").write_text("ann\nbob\n")
    assert at.type(block.text) == []
    assert at.type("mq peek mq/jobs/mail")[-2:] == ["ann", "bob"]


@treated("mq.1", "mq ls mq/jobs")
def what_waits(at: Scene, block: Block) -> None:
    people, programs = block.lines
    head, *rows = at.type(people.typed)
    assert head.split()[:3] == ["NAME", "KIND", "WAITING"]
    assert rows[0].split()[:2] == ["mail", "stream"]
    assert "jobs/mail" in at.type(programs.typed)


@treated("mq.1", "mq ctl mq/jobs 'retries many'")
def why_a_setting_is_refused(at: Scene, block: Block) -> None:
    at.type_as_shown(block, 1)


@treated("mq.1", "mq redrive mq/jobs")
def try_again_what_was_given_up(at: Scene, block: Block) -> None:
    """With a message that a worker has just given up."""
    (at.mount / "jobs" / ".consumers" / "worker").touch()
    (at.mount / "jobs" / "mail").write_text("bad\n")
    work = "mq-work -e mq/jobs/.consumers/worker --"
    at.type(f"{work} sh -c 'exit 65' 2>/dev/null")
    assert "bad" in at.type("mq peek mq/jobs/dead")
    at.type(block.text)
    assert "bad" in at.type(f"{work} cat")


@treated("mq.1", "mq top --json -n 60 --interval 1m")
def what_is_slowest(at: Scene, block: Block) -> None:
    """Two seconds of the hour."""
    short = block.text.replace("-n 60 --interval 1m", "-n 2 --interval 1s")
    assert short != block.text
    assert at.type(short) == []
    rows = [json.loads(row) for row in (at.folder / "top.json").read_text().splitlines()]
    assert [any(one["name"] == "mq/jobs/mail" for one in row) for row in rows] == [True, True]


@treated("mq.1", 'eval "$(mq completion bash)"')
def in_bashrc(at: Scene, block: Block) -> None:
    assert at.type(block.text) == []
    at.type("COMP_WORDS=(mq pe) COMP_CWORD=1; _mq_completion mq pe mq")
    assert at.type('echo "${COMPREPLY[@]}"') == ["peek"]


# ---------------------------------------------------------------- pin(1)


@prepared("pin.1")
def a_make_file(at: Scene) -> None:
    at.serve()
    (at.folder / "Makefile").write_text("all: one two\none two:\n\t@echo made $@\n")
    at.defer(lambda: hang_up(at))


@treated("pin.1", "pin work")
def a_shell_that_stays(at: Scene, block: Block) -> None:
    terminal = at.typing.terminal
    at.typing.begin(block.text)
    eventually(at.typing.raw, "attached")
    terminal.sendline("echo answer-$((40 + 2))")
    terminal.expect_exact("answer-42\r\n")
    terminal.send(KEY)
    at.typing.prompt()
    assert at.typing.code == 0
    at.typing.begin(block.text)
    terminal.expect_exact("answer-42\r\n")
    terminal.send(KEY)
    at.typing.prompt()
    assert at.typing.code == 0


@treated("pin.1", "pin -c build make -j4")
def a_long_build(at: Scene, block: Block) -> None:
    create, look = block.lines
    assert at.type(create.typed) == []
    assert sorted(at.type(look.typed)) == ["made one", "made two"]


@treated("pin.1", "pin -w work ls -l")
def type_into_it_from_elsewhere(at: Scene, block: Block) -> None:
    for line, shows in zip(block.lines, (r"-rw.* Makefile\r\n", r"\d\d:\d\d:\d\d .*\d{4}\r\n"), strict=True):
        assert at.type(line.typed) == []
        eventually(lambda: re.search(shows, history(at)) is not None, line.typed)  # noqa: B023


@treated("pin.1", "printf '\\003' | pin -w work")
def interrupt_what_runs_in_it(at: Scene, block: Block) -> None:
    at.type("pin -w work 'echo begun-$((1)); sleep 1000; echo not this'")
    eventually(lambda: "begun-1\r\n" in history(at), "it runs")
    eventually(lambda: runs("sleep 1000", at.folder), "it sleeps")
    assert at.type(block.text) == []
    eventually(lambda: not runs("sleep 1000", at.folder), "the interrupt")
    at.type("pin -w work 'echo ended-$((1))'")
    eventually(lambda: "ended-1\r\n" in history(at), "the session continues")
    assert "\nnot this" not in history(at)


@treated("pin.1", "mq-cat -e --from first mq/work out")
def everything_it_has_shown(at: Scene, block: Block) -> None:
    said = at.type(block.text)
    assert "answer-42" in said
    assert "ended-1" in said


# ---------------------------------------------------------------- what they share


def history(at: Scene) -> str:
    """All that the session `work` has shown."""
    return str(mq_cat("-e", "--from", "first", at.mount / "work", "out").stdout.decode())


def hang_up(at: Scene) -> None:
    """End all sessions."""
    for session in at.mount.glob("*/out"):
        shutil.rmtree(session.parent)
    eventually(lambda: not runs("/bin/bash -i", at.folder), "the session's end")


def runs(command: str, folder: Path) -> bool:
    """Is there a process with these words, in that folder?"""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().rstrip(b"\0").split(b"\0")
            if b" ".join(words) == command.encode() and (process / "cwd").readlink() == folder:
                return True
        except OSError:
            continue
    return False
