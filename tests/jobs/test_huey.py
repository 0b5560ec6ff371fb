"""huey over mqfs: huey's own tests of a storage and of its interface, and what they do not ask."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from huey.constants import EmptyData
from huey.exceptions import HueyException
from huey.tests import base, test_api, test_priority, test_storage

import mqfs
from mqfs.huey import MqfsHuey, MqfsStorage
from mqfs.ninep.client.machine import ClientMachine
from tests.support.eventually import HANG_S, eventually
from tests.support.full_log import FILLER, FULL, fill_log
from tests.support.server import Server, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
Make = Callable[..., MqfsHuey]
LATER = timedelta(days=30 * 365)


class LaterStorage(MqfsStorage):
    """The times of huey's tests of a schedule are past, and a task that is due is in the queue: they are moved."""

    def add_to_schedule(self, data: bytes, ts: datetime, priority: float | None = None, id: str = "") -> None:
        super().add_to_schedule(data, ts + LATER, priority, id)

    def read_schedule(self, ts: datetime) -> list[bytes]:
        return super().read_schedule(ts + LATER)


class OverMqfs(base.BaseTestCase):  # type: ignore[misc]
    """A test case of huey, over a group of its own."""

    @pytest.fixture(autouse=True)
    def remember(self, server: Server, name: str) -> None:
        self.address, self.name = server.address, name

    def get_huey(self) -> MqfsHuey:
        huey = MqfsHuey(self.name, address=self.address, utc=False, read_timeout=0.01)
        self.addCleanup(lambda: huey.storage.close())
        return huey


class TestStorage(test_storage.StorageTests, OverMqfs):  # type: ignore[misc]
    test_put_if_empty_concurrent = test_storage.TestMemoryStorage.test_put_if_empty_concurrent

    def get_huey(self) -> MqfsHuey:
        huey = super().get_huey()
        huey.storage = LaterStorage(self.name, address=self.address, utc=False, read_timeout=0.01)
        return huey


class TestPriority(OverMqfs, test_priority.TestPriority):  # type: ignore[misc]
    pass


class TestQueue(OverMqfs, test_api.TestQueue):  # type: ignore[misc]
    test_read_schedule = None  # reads from the schedule what is due: it is in the queue
    test_reschedule_priority = None  # priorities above 9


@pytest.fixture
def make(server: Server, name: str) -> Iterator[Make]:
    made: list[MqfsHuey] = []

    def make(read_timeout: float = 0.01, **options: Any) -> MqfsHuey:
        made.append(MqfsHuey(name, address=server.address, read_timeout=read_timeout, **options))
        return made[-1]

    yield make
    for huey in made:
        huey.storage.close()


def taken(huey: MqfsHuey) -> Any:
    """The next task, when it is there."""
    return eventually(huey.dequeue)


def test_a_task_that_is_due_comes_by_itself(make: Make) -> None:
    """At its time and not before, with its priority, by whatever zone it was given."""
    for utc in (True, False):
        huey = make(utc=utc)
        note = huey.task(name="note")(lambda n: n)
        due = int(time.time()) + 2  # huey knows whole seconds
        note.schedule((1,), eta=datetime.fromtimestamp(due, UTC if utc else None).replace(tzinfo=None), priority=7)
        huey.execute(huey.dequeue())
        assert (huey.scheduled_count(), [task.args for task in huey.scheduled()], len(huey)) == (1, [(1,)], 0)
        note(2)
        assert huey.execute(huey.dequeue()) == 2
        task = taken(huey)
        assert 0 <= time.time() - due < 1
        assert (huey.execute(task), task.priority, huey.scheduled()) == (1, 7, [])


def test_a_schedule_of_a_year_is_flushed(make: Make) -> None:
    huey = make()
    note = huey.task(name="note")(lambda n: n)
    for n in range(3):
        note.schedule((n,), delay=365 * 86_400)
        huey.execute(huey.dequeue())
    assert [task.args for task in huey.scheduled(2)] == [(0,), (1,)]
    huey.storage.flush_schedule()
    assert (huey.scheduled_count(), huey.scheduled(), len(huey)) == (0, [], 0)
    note.schedule((9,), delay=100 * 365 * 86_400)
    with pytest.raises(mqfs.BadRequest, match="invalid duration"):
        huey.execute(huey.dequeue())


def test_what_is_pending_is_listed_without_a_warning(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    huey = make()
    job = huey.task()(lambda: None)
    job()
    assert (len(huey.pending()), caplog.text) == (1, "")


def test_what_a_worker_has_is_requeued_when_it_ends(make: Make) -> None:
    first, second = make(), make()
    note = first.task(name="note")(lambda n: n)
    second.task(name="note")(lambda n: n)
    note(1)
    assert (first.dequeue().args, second.dequeue()) == ((1,), None)
    first.storage.close()
    task = taken(second)
    assert (second.execute(task), second.dequeue(), len(first)) == (1, None, 0)


def test_what_is_no_task_and_cannot_be_a_dead_letter_comes_again(make: Make, server: Server, name: str) -> None:
    """Its own error is raised, not that of the refusal."""
    with server.connect() as client:
        ctl = ["deliver one", "replay off", *FULL, "backoff 1ms 1ms", "retries 0"]
        group = client.group(f"{name}/tasks", create=True, ctl=ctl)
        huey = make()
        huey.task(name="note")(lambda n: n)
        group.publish("queue", b"garbage")
        fill_log(group)
        for _ in range(2):
            with pytest.raises(Exception, match=r"pickl|load"):
                huey.dequeue()
        group.purge(FILLER)
        with pytest.raises(Exception, match=r"pickl|load"):
            huey.dequeue()
        assert (group.stats().dead_letters, group.stats().streams["queue"].consumer.claimed) == (1, 0)


def test_a_task_is_scheduled_once(make: Make) -> None:
    """Though its worker ended before it acknowledged it."""
    first, second = make(), make()
    note = first.task(name="note")(lambda n: n)
    second.task(name="note")(lambda n: n)
    note.schedule((1,), delay=100)
    first.add_schedule(first.dequeue())
    first.storage.close()
    second.execute(taken(second))
    assert (second.scheduled_count(), len(second.scheduled()), len(second)) == (1, 1, 0)


@pytest.mark.parametrize("size", [1_100_000, 2_500_000])
def test_a_task_that_is_too_long_to_be_delayed_is_retried_at_once(
    make: Make, size: int, caplog: pytest.LogCaptureFixture
) -> None:
    """As often as it says, and no more."""
    huey, runs = make(results=False), list[int]()

    @huey.task(name="fail", retries=2, retry_delay=1000)  # type: ignore[untyped-decorator]
    def fail(text: str) -> None:
        runs.append(len(text))
        raise RuntimeError("each time")

    fail("x" * size)
    for _ in range(3):
        huey.execute(taken(huey))
    stats = huey.storage._group("tasks").stats()
    assert (runs, stats.dead_letters, stats.streams["queue"].consumer.lag) == ([size] * 3, 0, 0)
    assert caplog.text.count("is executed at once, not at") == 2


def test_an_interrupted_task_is_given_back(make: Make) -> None:
    huey = make()

    @huey.task(name="stop")  # type: ignore[untyped-decorator]
    def stop() -> None:
        raise KeyboardInterrupt

    stop()
    huey.execute(huey.dequeue())
    assert taken(huey).name == "stop"
    assert huey.storage._group("tasks").stats().streams["queue"].consumer.failed == 0


def test_what_cannot_be_executed_is_a_dead_letter(make: Make) -> None:
    """A task of another program at once, one whose result cannot be stored after the retries of the group."""
    huey = make()
    huey.storage._group("tasks").ctl("retries 2", "backoff 0 0")
    huey.storage.enqueue(b"no task")
    with pytest.raises(Exception, match="invalid load key"):
        huey.dequeue()
    other = make().task(name="other")(lambda: None)
    other()
    with pytest.raises(HueyException, match="not found"):
        huey.dequeue()
    bad = huey.task(name="bad")(threading.Lock)
    bad()
    for _ in range(2):
        task = taken(huey)
        with pytest.raises(TypeError, match="cannot pickle"):
            huey.execute(task)
    letters = [letter.headers["reason"] for letter in huey.storage._group("tasks").history(pattern="dead")]
    assert [letter.startswith("not a task of this program") for letter in letters] == [True, True, False]
    assert len(huey) == 0


def test_a_revocation_holds_at_once(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another program, for a task that a worker has already, but for a millisecond; also one that is made while the
    task is executed, which ends with it."""
    monkeypatch.setattr("mqfs.huey._FRESH_S", 0.0)
    worker, other = make(), make()
    done: list[int] = []

    @worker.task(name="note")  # type: ignore[untyped-decorator]
    def note(n: int) -> None:
        done.append(n)
        if n == 4:
            other.revoke_by_id(held.id)

    other.task(name="note")(note.func)
    for n in range(6):
        note(n)
    worker.execute(worker.dequeue())
    held = worker.dequeue()
    other.revoke_by_id(held.id)
    worker.execute(held)
    other.revoke_all(note.task_class, revoke_once=True)
    for _ in range(2):
        worker.execute(worker.dequeue())
    held = worker.dequeue()
    worker.execute(held)
    worker.execute(worker.dequeue())
    assert done == [0, 3, 4, 5]
    assert not other.is_revoked(held.id)


def test_a_revocation_holds_for_a_worker_that_waits(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has asked for a task, and whether any is revoked, before one is revoked and then published."""
    monkeypatch.setattr("mqfs.huey._FRESH_S", HANG_S)
    worker, other = make(HANG_S), make()
    done, sent = list[int](), requests(monkeypatch)
    note = worker.task(name="note")(done.append)
    with ThreadPoolExecutor(1) as thread:
        begun = thread.submit(lambda: worker.execute(taken(worker)))
        eventually(lambda: sent[-2:] == ["Tread", "Twalk"], "a worker that waits")
        other.revoke_all(note.task_class)
        note(1)
        begun.result()
    assert not done


def test_what_was_known_before_the_acknowledgement_is_not_believed_for_long(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that waited for the disk, or for the rest of a body, looks for revocations again."""
    monkeypatch.setattr("mqfs.huey._FRESH_S", 0.1)
    worker, other = make(HANG_S), make()
    done: list[int] = []
    note = worker.task(name="note")(done.append)
    note(1)
    held = worker.dequeue()
    assert held.claim._found is False
    other.revoke_by_id(held.id)
    eventually(lambda: time.monotonic() > held.claim._asked_at + 0.1, "an old answer")
    worker.execute(held)
    assert not done


def requests(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kinds of those that are sent from now on."""
    sent, call_all = list[str](), ClientMachine.call_all

    def noted(machine: ClientMachine, them: Sequence[Any]) -> list[int]:
        sent.extend(type(it).__name__ for it in them)
        return call_all(machine, them)

    monkeypatch.setattr(ClientMachine, "call_all", noted)
    return sent


@pytest.mark.parametrize("once", ["never revoked", "revoked before"])
def test_a_task_takes_one_round_trip(make: Make, monkeypatch: pytest.MonkeyPatch, once: str) -> None:
    """It is claimed and looked for among the revocations at once, and the one before is acknowledged meanwhile. From
    the first revocation on those of the task and of its kind are looked for, and the task's again when it has ended."""
    monkeypatch.setattr("mqfs.huey._FRESH_S", HANG_S)
    huey = make(HANG_S)
    if once == "revoked before":
        make().revoke_by_id("another")
    note = huey.task(name="note")(lambda: None)
    for _ in range(3):
        note()
    huey.execute(huey.dequeue())
    sent = requests(monkeypatch)
    huey.execute(huey.dequeue())
    task = huey.dequeue()
    if once == "never revoked":
        assert sent == ["Tread", "Twalk", "Twrite", "Tread", "Twalk"]
    else:
        assert sent == ["Tread", "Twalk", "Twalk", "Twalk", "Twrite", "Tread"]
    huey.execute(task)


def test_a_value_is_popped_by_one(make: Make) -> None:
    huey, got = make(), list[Any]()
    start = threading.Barrier(8)

    def pop() -> None:
        start.wait()
        got.extend(huey.storage.pop_data(f"k{n}") for n in range(20))

    for n in range(20):
        huey.storage.put_data(f"k{n}", b"old")
        huey.storage.put_data(f"k{n}", b"%d" % n)
    threads = [threading.Thread(target=pop) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(value for value in got if value is not EmptyData) == sorted(b"%d" % n for n in range(20))
    assert huey.result_count() == 0


def test_a_counter_of_many_threads(make: Make) -> None:
    huey = make()
    threads = [threading.Thread(target=lambda: [huey.storage.incr("n") for _ in range(20)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert huey.storage.incr("n", 0) == 80


def test_any_key_and_large_values(make: Make) -> None:
    storage = make().storage
    for key in ("*", "a/b.#", "ctl", ".x", "grün" * 50):
        storage.put_data(key, key.encode())
    storage.put_data("large", b"x" * 3_000_000)
    assert [storage.peek_data(key) for key in ("*", "a/b.#", "ctl", ".x")] == [b"*", b"a/b.#", b"ctl", b".x"]
    assert storage.wait_result("*", timeout=0)
    assert not storage.wait_result("missing", timeout=0)
    assert storage.pop_data("large") == b"x" * 3_000_000
    assert storage.pop_data("large") is EmptyData
    with pytest.raises(mqfs.TooLong, match=r"result 'larger': 64000001 bytes \(expected at most 64000000\)"):
        storage.put_data("larger", bytes(64_000_001))
    assert not storage.has_data_for_key("larger")


def test_a_worker_waits_for_a_server_that_is_killed() -> None:
    with short_folder() as folder, Server.at(folder) as server:
        huey = MqfsHuey("x", address=server.address, read_timeout=20)
        note = huey.task(name="note")(lambda n: n)
        result = note(1)
        held = huey.dequeue()
        server.restart()
        huey.execute(held)  # its acknowledgement is void
        again = taken(huey)
        assert (again.id, again.claim.deliveries) == (held.id, 2)
        assert huey.execute(again) == 1
        assert result.get(blocking=True, timeout=20) == 1
        huey.storage.close()
