"""What the library's objects say about themselves, and the calls that ask and change one thing."""

from __future__ import annotations

import queue
import re
import subprocess
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import attrs
import pytest

import mqfs
from mqfs import Client, Settings, errors, testing
from mqfs.engine.language import settings as ctl
from tests.support.eventually import HANG_S, eventually
from tests.support.server import Server


def test_the_names_of_the_library_are_attributes_of_mqfs() -> None:
    raised = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, Exception)}
    assert raised <= set(mqfs.__all__)
    assert mqfs.NotFound is errors.NotFound
    assert len(mqfs.__all__) == len(set(mqfs.__all__))
    for name in mqfs.__all__:
        assert getattr(mqfs, name) is not None


@pytest.mark.process
def test_import_alone_loads_nothing() -> None:
    code = "import sys, mqfs; dir(mqfs); print(sorted(m for m in sys.modules if m.startswith('mqfs')))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert loaded.strip() == "['mqfs']"


def test_reprs_say_what_it_is_and_its_state(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(replay="all"))
    at, label = f"in group {name!r} at {tree._link.label}", tree._link.label
    assert repr(tree) == f"<mqfs client of {label}>"
    assert repr(group) == f"<mqfs group {name!r} at {label}>"
    group.publish("s", b"x" * 50)
    message = group.get(1)
    assert repr(message) == f"<mqfs message 1 of 's': {b'x' * 40!r}..., 50 bytes>"
    messages = group.subscribe("s")
    assert repr(messages) == f"<mqfs subscription to 's' {at}, open>"
    messages.close()
    assert repr(messages).endswith(", closed>")
    with group.consume("c") as claims:
        assert repr(claims) == f"<mqfs claims of 'c' {at}, open>"
        claim = claims.get(HANG_S)
        assert repr(claim) == "<mqfs claim 1 of 's' by 'c', open>"
        claim.ack()
        assert repr(claim) == "<mqfs claim 1 of 's' by 'c', settled>"
    assert repr(claims).endswith(", closed>")
    assert repr(group.consumer("c")) == f"<mqfs consumer 'c' of group {name!r} at {label}>"
    registration = group.on("s", print)
    assert repr(registration) == "<mqfs registration of <built-in function print> for 's', active>"
    registration.unsubscribe()
    assert repr(registration).endswith(", ended>")
    worker = group.work("c", print)
    assert repr(worker) == "<mqfs worker of 'c', 1 threads, running>"
    worker.stop()
    assert repr(worker).endswith(", stopped>")
    with group.writer("s") as body:
        body.write(b"abc")
        assert repr(body) == "<mqfs body of 's', 3 bytes, open>"
    assert repr(body) == "<mqfs body of 's', closed>"


# ---------------------------------------------------------------- addresses


@pytest.mark.process
@pytest.mark.parametrize("form", ["unix!{}", "unix:{}", "unix://{}"])
@pytest.mark.parametrize("transport", ["9p", "auto"])
def test_every_form_of_a_unix_address_connects(shared: Server, form: str, transport: str) -> None:
    path = shared.address.removeprefix("unix!")
    with mqfs.connect(form.format(path), transport=transport) as client:
        client.group()


def test_every_form_of_a_tcp_address_connects() -> None:
    with mqfs.serve(listen="tcp!127.0.0.1!0") as running:
        port = running.address.rpartition("!")[2]
        for form in ("tcp!127.0.0.1!{}", "tcp://127.0.0.1:{}", "127.0.0.1:{}", "localhost:{}"):
            with mqfs.connect(form.format(port)) as client:
                client.group()


def test_without_an_address_the_usual_places_are_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(folder))
    monkeypatch.delenv("MQFS_ADDRESS", raising=False)
    with pytest.raises(mqfs.Disconnected, match=rf"no server: neither \./mqfs\.sock nor {folder}/mqfs\.sock"):
        mqfs.connect()
    with mqfs.serve(listen=f"unix!{folder}/mqfs.sock"), mqfs.connect() as client:
        assert str(folder) in repr(client)
        with mqfs.serve(listen="unix!mqfs.sock"), mqfs.connect() as nearer:
            assert repr(nearer) == "<mqfs client of unix!mqfs.sock>"
            monkeypatch.setenv("MQFS_ADDRESS", f"unix:{folder}/mqfs.sock")
            with mqfs.connect() as named:
                assert str(folder) in repr(named)


# ---------------------------------------------------------------- settings, counters, one message, one consumer


def test_an_error_names_what_the_caller_wrote_and_hides_the_protocols_frames(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    with pytest.raises(TypeError, match="cannot be interpreted as an integer"):
        group.history("nope")  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        group.history(last=2.5)  # type: ignore[arg-type]
    with pytest.raises(errors.BadCommand, match=r"^replay 'everything': unknown value") as refused:
        group.ctl("replay everything")
    frames = [str(frame.path) for frame in refused.traceback if "ninep" in str(frame.path)]
    assert len(frames) <= 2, frames


def test_every_setting_of_ctl_is_one_of_the_library_read_and_printed_alike() -> None:
    assert {field.name for field in attrs.fields(Settings)} == ctl.SETTINGS.keys()
    lines = ctl.parse_settings(["deliver one", "sync 5ms", "protect on", "dead 'a b'", "words . + #"]).lines()
    assert ctl.parse_settings(Settings.parse(lines).lines()).lines() == lines


def test_settings_are_typed_and_read_back(tree: Client, name: str) -> None:
    given = Settings(
        replay="all", depth=7, ttl="1h", full="reject", sync=1.5, retries=3, backoff=(0.5, "2m"), dead="it's dead",
        order="expiry", dedup=60, protect=True, words=(".", "+", "#"), lease="30s",
    )  # fmt: skip
    group = tree.group(name, create=True, settings=given)
    settings = group.settings()
    assert (settings.replay, settings.depth, settings.ttl, settings.full) == ("all", 7, 3_600.0, "reject")
    assert (settings.sync, settings.retries, settings.backoff, settings.dead) == (1.5, 3, (0.5, 120.0), "it's dead")
    assert (settings.protect, settings.words, settings.lease) == (True, (".", "+", "#"), 30.0)
    group.ctl(settings, "protect off", Settings(depth="64K"))
    assert (group.settings().depth, group.settings().protect) == ("64K", False)
    work = tree.group(f"{name}-2", create=True, settings=Settings(deliver="one", ack="next"), ctl=["bind all '#'"])
    assert (work.settings().ack, work.settings().full) == ("next", "reject")
    with pytest.raises(errors.BadRequest, match=r"invalid settings \['replay all'\] \(expected mqfs.Settings, or ctl="):
        tree.group(name, settings=["replay all"])  # type: ignore[arg-type]
    with pytest.raises(errors.NotFound):
        tree.group(f"{name}-3")


def test_counters_have_types(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(replay="all"))
    group.publish_many([("a", b"123"), ("b", b"4")])
    group.consume("c", over="a").close()
    stats = group.stats()
    assert (stats.next, stats.written, stats.written_bytes, stats.groups) == (3, 2, 4, ())
    assert (stats.streams["a"].messages, stats.streams["a"].bytes, stats.streams["a"].first) == (1, 3, 1)
    assert (stats.consumers["c"].over, stats.consumers["c"].waiting, stats.consumers["c"].lag) == ("a", 1, 1)


def test_one_message_is_got_by_its_sequence(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(replay="all"))
    group.publish("s", b"1")
    group.publish("s", b"x" * 2_500_000)
    group.publish("t", b"3", headers={"k": "v"})
    assert group.get(1).body == b"1"
    assert group.get(2).size == 2_500_000
    assert group.get(group.stats().next - 1).headers["k"] == "v"
    for sequence in (99, 10**9):
        with pytest.raises(errors.NotFound, match=f"no message {sequence} in group '{name}'".replace("[", r"\[")):
            group.get(sequence)
    group.purge("s")
    with pytest.raises(errors.NotFound):
        group.get(1)
    with pytest.raises(errors.BadRequest, match=r"get failed: sequence 0 \(expected 1 or more\)"):
        group.get(0)


def test_a_group_that_is_missing_is_named(tree: Client, name: str) -> None:
    tree.group(name, create=True).create("s")
    for path in f"{name}/none", f"{name}/s":
        with pytest.raises(errors.NotFound, match=rf"^no group '{re.escape(path)}' \(make it: create=True\)$"):
            tree.group(path)


def test_a_history_beyond_the_end_ends(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(replay="all"))
    assert list(group.history(last=1_000_000)) == []
    group.publish("s", b"1")
    assert [message.body for message in group.history(last=1_000_000)] == [b"1"]
    assert [message.body for message in group.history(1, 2)] == [b"1"]
    assert list(group.history(99, 1_000_000)) == []


@pytest.mark.process
def test_a_user_without_rights_on_put_publishes_by_the_stream(shared: Server, name: str) -> None:
    with shared.connect(transport="9p") as client:
        group = client.group(name, create=True, settings=Settings(replay="all"))
        group.create("s")
        client._link.connection().chmod(f"{name}/s", 0o666)  # type: ignore[attr-defined]
        client._link.connection().chmod(f"{name}/.put", 0o600)  # type: ignore[attr-defined]
        with shared.connect(transport="9p", user="nobody") as other:
            there = mqfs.Group(other._link, name, True)
            assert there.publish("s", b"x") == mqfs.Receipt()
            with pytest.raises(errors.Denied):
                there.publish("s", b"x", ttl=1)
        assert group.get(1).body == b"x"


def test_a_consumer_is_looked_at_and_moved(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(replay="all"))
    for number in range(5):
        group.publish("s", str(number))
    consumer = group.consumer("c")
    with pytest.raises(errors.NotFound, match="no consumer 'c' in group"):
        consumer.info()
    with group.consume("c") as claims:
        claims.get(HANG_S).ack()
        claims.get(HANG_S)
        assert (consumer.lag(), consumer.info().claimed, consumer.info().handles) == (4, 1, 1)
        consumer.seek(4)
        assert claims.get(HANG_S).body == b"3"
        consumer.seek("first")
        assert claims.get(HANG_S).body == b"0"
        consumer.seek("end")
        assert consumer.lag() == 0
        consumer.seek(since="1h")
        assert claims.get(HANG_S).body == b"0"
    for wrong in ({}, {"to": 1, "since": "1h"}):
        with pytest.raises(errors.BadRequest, match="expected one of them"):
            consumer.seek(**wrong)  # type: ignore[arg-type]


def test_a_consumer_holds_back_messages_by_rules(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(replay="all"))
    group.ctl("consumer c order key")
    consumer = group.consumer("c")
    for key in ("a", "a", "b"):
        group.publish("s", key, key=key)
    with group.consume("c") as claims:
        first, second = claims.get(HANG_S), claims.get(HANG_S)
        assert [(claim.sequence, claim.message.key) for claim in (first, second)] == [(1, "a"), (3, "b")]
        assert consumer.info().held_back == "key"
        consumer.pause()
        first.ack()
        with pytest.raises(TimeoutError):
            claims.get(0.05)
        assert (consumer.info().held_back, consumer.lag()) == ("paused", 2)
        consumer.resume()
        assert claims.get(HANG_S).sequence == 2
    consumer.limit(5)
    consumer.limit(2, per_key=True)
    consumer.rate("100/s")
    consumer.breaker("10/5m")
    consumer.pause("1h")
    rules = [line for line in group._ctl_lines() if line.split()[1:2] == ["c"]]
    assert rules[:-1] == ["consumer c order key", "limit c 5", "limit c 2 key", "rate c 100/s", "breaker c 10/5m"]
    assert rules[-1].startswith("pause c ")
    with pytest.raises(errors.NotFound, match="no consumer 'd'"):
        group.consumer("d").resume()
    with pytest.raises(errors.BadCommand, match="rate: invalid value"):
        consumer.rate("fast")


def test_a_group_is_removed_with_all_that_is_in_it(tree: Client, name: str) -> None:
    group = tree.group(f"{name}/in/ner", create=True, settings=Settings(replay="all"))
    group.publish("s", b"x")
    group.bind("view", "s")
    group.consume("c").close()
    tree.group(f"{name}/in").publish("s", b"x")
    with pytest.raises(errors.NotEmpty):
        tree.remove_group(name)
    tree.remove_group(name, recursive=True)
    with pytest.raises(errors.NotFound):
        tree.group(name)


@pytest.mark.parametrize(("line", "error"), [("replay all", errors.NotEmpty), ("protect on", errors.NotPermitted)])
def test_a_group_that_is_not_removed_is_as_before(
    tree: Client, name: str, line: str, error: type[errors.MqfsError]
) -> None:
    """Its handlers are called, and those of one that is removed end."""
    group, got = tree.group(name, create=True, ctl=[line]), queue.SimpleQueue[bytes]()
    if error is errors.NotEmpty:
        group.create("s")
    registration = group.on("#", lambda message: got.put(message.body))
    with pytest.raises(error):
        tree.remove_group(name)
    assert tree.group(name) is group
    assert registration.active
    group.publish("s", b"x")
    assert got.get(timeout=HANG_S) == b"x"
    group.ctl("protect off")
    group.remove("s")
    tree.remove_group(name)
    registration.join(HANG_S)
    assert not registration.active


def test_a_worker_reports_errors(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(replay="all", retries=1))
    group.publish("s", b"x")
    reported: queue.Queue[tuple[Exception, object]] = queue.Queue()

    def fail(claim: mqfs.Claim) -> None:
        raise ZeroDivisionError

    with group.work("c", fail, on_error=lambda error, message: reported.put((error, message))):
        error, message = reported.get(timeout=HANG_S)
    assert isinstance(error, ZeroDivisionError)
    assert isinstance(message, mqfs.Message)
    assert message.body == b"x"


# ---------------------------------------------------------------- mqfs.Queue


def test_a_queue_has_the_calls_of_the_standard_one(tree: Client, name: str) -> None:
    group = tree.group(name, create=True)
    with mqfs.Queue(group, "jobs") as jobs:
        assert jobs.empty()
        for number in range(3):
            jobs.put(str(number))
        assert jobs.qsize() == 3
        assert [jobs.get(timeout=HANG_S), jobs.get_nowait()] == [b"0", b"1"]
        jobs.task_done()
        jobs.task_done()
        with pytest.raises(ValueError, match="no item of this thread"):
            jobs.task_done()
        assert jobs.get(timeout=HANG_S) == b"2"
        with pytest.raises(queue.Empty):
            jobs.get_nowait()
        with pytest.raises(queue.Empty):
            jobs.get(timeout=0.01)
        joined = threading.Thread(target=jobs.join, daemon=True)
        joined.start()
        jobs.task_done()
        joined.join(HANG_S)
        assert not joined.is_alive()
        jobs.put("again")
        jobs.get(timeout=HANG_S)
    with mqfs.Queue(group, "jobs") as jobs:
        assert jobs.get(timeout=HANG_S) == b"again", "without task_done it goes to another"


def test_a_thread_that_waits_in_a_queue_delays_no_other(tree: Client, name: str) -> None:
    got: list[bytes] = []
    with mqfs.Queue(tree.group(name, create=True), "jobs") as jobs:
        waiting = threading.Thread(target=lambda: got.append(jobs.get(timeout=HANG_S)), daemon=True)
        waiting.start()
        eventually(jobs._claims._turn.locked)
        with pytest.raises(queue.Empty):
            jobs.get_nowait()
        with pytest.raises(queue.Empty):
            jobs.get(timeout=0.01)
        jobs.put("1")
        waiting.join(HANG_S)
    assert got == [b"1"]


def test_an_item_whose_acknowledgement_fails_is_not_forgotten(
    tree: Client, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    group = tree.group(name, create=True)
    with mqfs.Queue(group, "jobs") as jobs:
        jobs.put("0")
        jobs.get(timeout=HANG_S)
        with monkeypatch.context() as full:
            full.setattr(jobs._claims, "_command", Mock(side_effect=errors.DiskFull("no room")))
            with pytest.raises(errors.DiskFull):
                jobs.task_done()
        jobs.task_done()
        assert group.consumer("jobs").lag() == 0


def test_an_item_that_went_to_another_program_is_forgotten(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, ctl=["lease 30ms"])
    with mqfs.Queue(group, "jobs") as jobs, mqfs.Queue(group, "jobs") as others:
        jobs.put("0")
        jobs.get(timeout=HANG_S)
        others.get(timeout=HANG_S)
        with pytest.raises(errors.Stale):
            jobs.task_done()
        with pytest.raises(ValueError, match="no item of this thread"):
            jobs.task_done()


def test_a_full_queue_says_so(tree: Client, name: str) -> None:
    group = tree.group(name, create=True, settings=Settings(depth=1, full="block", replay="all"))
    with mqfs.Queue(group, "jobs") as jobs:
        jobs.put("1")
        for call in (lambda: jobs.put_nowait("2"), lambda: jobs.put("2", timeout=0.01)):
            with pytest.raises(queue.Full):
                call()
        group.ctl(Settings(full="reject"))
        with pytest.raises(queue.Full):
            jobs.put("2")
        assert jobs.qsize() == 1


def test_a_server_for_tests() -> None:
    with testing.server() as running, mqfs.connect(running.address) as client:
        group = client.group("g", create=True)
        assert group.publish("s", b"x").retained
        assert group.settings().replay == "all"
        eventually(lambda: [message.body for message in group.history()] == [b"x"])


mqfs_server, mqfs_client = testing.mqfs_server, testing.mqfs_client


def test_fixtures_for_tests(mqfs_client: Client) -> None:
    assert mqfs_client.group("g", create=True).publish("s", b"x").sequence == 1
