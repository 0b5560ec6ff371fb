"""The catalog of Durable Streams: who may write it, what trims it, and requests that have to wait."""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

import pytest

from mqfs.clock import SystemClock
from mqfs.engine.tree.tree import Tree
from mqfs.http.dialects.durable_streams import table
from mqfs.model import User
from mqfs.ninep.client import connection as ninep
from mqfs.store.store import DiskStore
from tests.engine.subject import USER as SUBJECT
from tests.http.subject import HttpSubject
from tests.http.test_durable_streams import Durable
from tests.http.web import USER
from tests.store.script import PATH
from tests.support.eventually import eventually
from tests.support.lying_disk import LyingDisk, RecordingDisk
from tests.support.ports import free_port
from tests.support.server import mqfs, short_folder

LONG_AGO = "2000-01-01T00:00:00Z"
NONSENSE = json.dumps({"stream": "__ds", "body": "nonsense"}) + "\n"


class Users:
    """A server and what three users say who they are by: its own, and two others."""

    def __init__(self, folder: Path) -> None:
        file = folder / "tokens"
        file.touch(0o600)

        def of(user: str, scope: str = "admin") -> dict[str, str]:
            words = "token", "new", user, "--token-file", str(file), "--scope", scope
            return {"Authorization": f"Bearer {mqfs(*words, cwd=folder).stdout.strip()}"}

        self.owner, self.writer, self.one, self.other = of(USER), of(USER, "write"), of("nobody"), of("daemon")
        self._prepare(folder / "store", ("shared", 0o777), ("sticky", 0o1777))
        self.ds = Durable(folder, "--token-file", str(file), "--default", "depth 1000", at=free_port())

    @staticmethod
    def _prepare(path: Path, *groups: tuple[str, int]) -> None:
        """Groups that are there at the start: 9P2000 makes none with the sticky bit."""
        me = User(os.geteuid(), os.getegid())
        store = DiskStore(str(path))
        tree = Tree(store, SystemClock(), owner=me)
        root = tree.mkdir(me, tree.root, "ds", 0o755)
        for name, mode in groups:
            ctl = tree.open(me, tree.walk(me, tree.mkdir(me, root, name, mode), "ctl"), os.O_WRONLY)  # type: ignore[arg-type]
            ctl.write(b"replay all\n")
            ctl.close()
        tree.close()
        store.close()

    def share(self, path: str, mode: int) -> None:
        """A group that all may write to."""
        assert self.ds.create(f"{path}/first", **self.owner).status == 201
        assert self.ds.ask("DELETE", f"{path}/first", **self.owner).status == 204
        with ninep.connect(self.ds.server.address) as owner:
            owner.chmod(f"ds{path}", mode)
            owner.remove(f"ds{path}/__ds")  # it has the mode that the group had before

    def names(self, path: str) -> set[str]:
        return {entry["name"] for entry in self.ds.tree.get(f"/ds{path}/", **self.owner).json["entries"]} - {"__ds"}


@pytest.fixture(scope="module")
def users() -> Iterator[Users]:
    with short_folder() as folder:
        it = Users(folder)
        with it.ds.server:
            yield it


# ---------------------------------------------------------------- who may write it


@pytest.mark.process
def test_all_who_may_make_streams_in_a_group_do(users: Users) -> None:
    """Also where one of them was the first: what a stream was made with is the group's, not the maker's."""
    ds = users.ds
    users.share("/new", 0o777)
    for name, user in (("a", users.one), ("b", users.other), ("c", users.owner)):
        assert ds.create(f"/new/{name}", "[1]", Content_Type="application/json", **user).status == 201
        assert ds.get(f"/new/{name}", **user).json == [1]


@pytest.mark.process
def test_who_may_not_write_the_catalog_leaves_no_stream(users: Users) -> None:
    ds = users.ds
    users.share("/closed", 0o777)
    assert ds.create("/closed/b", "x", **users.owner).status == 201
    with ninep.connect(ds.server.address) as owner:
        owner.chmod("ds/closed/__ds", 0o644)
    for _ in range(2):
        assert ds.create("/closed/a", "x", **users.one).status == 403
        assert users.names("/closed") == {"b"}


@pytest.mark.process
@pytest.mark.parametrize("path", ["/shared", "/sticky"])
def test_who_may_not_write_a_stream_makes_nothing_of_it(users: Users, path: str) -> None:
    """Also of one that is empty still, whatever it is asked to be: its owner writes to it later."""
    ds, name = users.ds, f"{path}/of-one"
    assert ds.create(f"{path}/source", "x", **users.other).status == 201
    assert ds.tree.ask("PUT", f"/ds{name}", **users.one).status == 201
    with ninep.connect(ds.server.address) as owner:
        owner.chmod(f"ds{name}", 0o600)
    before = ds.tree.get(f"/ds{path}/__ds?format=json", **users.owner).lines
    for more in (
        {},
        {"Stream_TTL": "1"},
        {"Stream_Expires_At": "2100-01-01T00:00:00Z"},
        {"Stream_Closed": "true"},
        {"Stream_Forked_From": f"{path}/source"},
    ):
        for body in ("", "spoof"):
            assert ds.create(name, body, **more, **users.other).status == 403, (more, body)
    assert ds.tree.get(f"/ds{path}/__ds?format=json", **users.owner).lines == before
    assert ds.append(name, "mine", **{**users.one, "Content_Type": "application/octet-stream"}).status == 204
    assert ds.get(name, **users.one).body == b"mine"


@pytest.mark.process
def test_a_stream_whose_name_a_new_group_takes_is_not_made(ds_alone: Durable) -> None:
    """Groups have numbers of their own: what it was to be made with would be that of another stream."""
    ds, answers = ds_alone, Counter[tuple[bool, bool]]()
    assert ds.create("/g/a").status == 201
    with ThreadPoolExecutor(1) as threads:
        for n in range(50):
            group = threads.submit(ds.tree.put, f"/ds/g/n{n}/")
            stream = ds.create(f"/g/n{n}", Stream_TTL="1000").status
            answers[group.result().status < 300, stream == 201] += 1
    assert set(answers) <= {(True, False), (False, True)}, answers
    made = {json.loads(line["body"])["stream"] for line in ds.tree.get("/ds/g/__ds?format=json").lines}
    assert len(made) == 1 + answers[False, True]


@pytest.mark.process
def test_a_stream_with_forks_is_deleted_by_who_may_remove_it(users: Users) -> None:
    ds = users.ds
    assert ds.create("/sticky/a", "x", **users.one).status == 201
    assert ds.create("/sticky/b", "y", Stream_Forked_From="/sticky/a", **users.other).status == 201
    for user in (users.other, users.writer):
        assert ds.ask("DELETE", "/sticky/a", **user).status in (401, 403)
        assert ds.get("/sticky/a", **users.one).body == b"x"
    assert ds.ask("DELETE", "/sticky/a", **users.one).status == 204
    assert ds.get("/sticky/a", **users.one).status == 410
    assert ds.get("/sticky/b", **users.other).body == b"xy"


@pytest.mark.process
@pytest.mark.parametrize(("path", "goes"), [("/shared", True), ("/sticky", False)])
def test_an_expired_stream_is_removed(users: Users, path: str, goes: bool) -> None:
    """For any reader; in a sticky group for who may remove it, as others may have written when it ends."""
    ds, name = users.ds, "ends"
    before = users.names(path)
    assert ds.create(f"{path}/{name}", "x", **users.one).status == 201
    number = json.loads(ds.tree.get(f"/ds{path}/__ds?format=json", **users.owner).lines[-1]["body"])
    ended = json.dumps(number | {"expires": LONG_AGO})
    assert ds.tree.post(f"/ds{path}/__ds", ended, **users.other).status == 201
    ds.server.restart()
    assert ds.get(f"{path}/{name}", **users.other).status == 404
    assert users.names(path) - before == (set() if goes else {name})
    assert ds.create(f"{path}/{name}", "mine", **users.other).status == (201 if goes else 409)
    if not goes:
        assert ds.tree.get(f"/ds{path}/{name}", **users.owner).body == b"x"
        assert ds.get(f"{path}/{name}", **users.one).status == 404
        assert users.names(path) == before


# ---------------------------------------------------------------- what other programs write

WRONG = ([], {}, [1], {"a": 1}, "x", -1, 1.5, 1e999, 2**53, True, None)
RIGHT = {"kind": ("x",), "asked": ("x",), "expires": (), "ttl": (None,), "deleted": (True,)}  # and are not wrong there


@pytest.mark.process
def test_records_of_the_wrong_type_are_another_program_s(ds_alone: Durable) -> None:
    """In the catalog, whatever field it is of: the stream is what it was made as."""
    ds, kind = ds_alone, {"Content_Type": "application/json", "Stream_TTL": "1000"}
    assert ds.create("/g/a", "[1]", **kind).status == 201
    (line,) = ds.tree.get("/ds/g/__ds?format=json").lines
    record = json.loads(line["body"])
    lines = [json.dumps(wrong) for wrong in WRONG]
    for field in record:
        lines += [json.dumps(record | {field: wrong}) for wrong in WRONG if wrong not in RIGHT.get(field, ())]
        lines.append(json.dumps({name: value for name, value in record.items() if name != field}))
    for text in lines:
        assert ds.tree.post("/ds/g/__ds", text).status == 201, text
    ds.server.restart()
    found = ds.get("/g/a")
    assert (found.status, found.body, found.headers["Content-Type"]) == (200, b"[1]", "application/json")
    assert ds.ask("HEAD", "/g/a").headers["Stream-TTL"] == "1000"


@pytest.mark.process
@pytest.mark.parametrize("field", ["producers", "seq", "closed", "closer"])
def test_headers_of_the_wrong_type_are_another_program_s(ds_alone: Durable, field: str) -> None:
    """The state is that of the append before."""
    ds, path = ds_alone, f"/g/{field}"
    numbers = [["p", 1], ["p", 1, 1, 1], ["p", "1", 1], ["p", 1, [1]], ["p", 1e999, 1], ["p", True, 1], ["p", -1, 0]]
    of_closer = [*numbers, [1, 1, 1], [[], 1, 1], ["\ud800", 1, 1]]
    values = {
        "producers": [[], *filter(None, WRONG), *({one[0]: one[1:]} for one in numbers), {"\ud800": [1, 1]}],
        "seq": [*(one for one in WRONG if one != "x"), "\ud800"],
        "closed": [one for one in WRONG if one is not True],
        "closer": [*WRONG, *of_closer],
    }[field]
    assert ds.create(path).status == 201
    assert ds.produce(path, "a", 1, 0, Stream_Seq="5").status == 200
    for value in values:
        text = quote(json.dumps({field: value}))
        assert ds.tree.post(f"/ds{path}?h-durable={text}", "other").status == 201, value
        assert ds.produce(path, "a", 1, 0).status == 204, value
        assert ds.append(path, "b", Stream_Seq="5").status == 409, value
    ds.server.restart()
    assert ds.produce(path, "a", 1, 0).status == 204
    assert ds.produce(path, "b", 1, 1).status == 200
    assert ds.get(path).body == b"a" + len(values) * b"other" + b"b"


@pytest.fixture
def ds_alone() -> Iterator[Durable]:
    with short_folder() as folder:
        ds = Durable(folder, at=free_port())
        with ds.server:
            yield ds


# ---------------------------------------------------------------- what trims it


@pytest.mark.process
@pytest.mark.parametrize("line", ["depth 100", "depth 1M", "ttl 1h"])
def test_a_group_that_trims_its_streams_is_refused(users: Users, line: str) -> None:
    """The catalog is one of them."""
    ds, path = users.ds, f"/trims-{line.replace(' ', '-')}"
    users.share(path, 0o755)
    assert ds.tree.post(f"/ds{path}/ctl", line, **users.owner).status == 204
    reply = ds.create(f"{path}/a", "x", **users.owner)
    assert (reply.status, b"no depth, no ttl" in reply.body) == (409, True)
    assert users.names(path) == set()


@pytest.mark.process
@pytest.mark.parametrize("full", ["drop-new", "reject", "block"])
def test_a_catalog_that_has_no_room_to_be_written_anew_is_kept(full: str) -> None:
    with short_folder() as folder:
        haste = json.dumps({"GROUP_BYTES": 256 << 10, "DURABLE_RECORDS": 2})
        program = (sys.executable, "-m", "tests.http.hasty_server")
        ds = Durable(folder, at=free_port(), program=program, HASTE=haste)
        with ds.server:
            assert ds.create("/g/a", "x", Stream_TTL="1000").status == 201
            assert ds.tree.post("/ds/g/.batch", NONSENSE * 20, Content_Type="application/x-ndjson").status == 201
            assert ds.tree.post("/ds/g/ctl", "full reject").status == 204
            for size in (10_000, 100):
                while ds.tree.post("/ds/g/a", bytes(size)).status == 201:
                    pass
            assert ds.tree.post("/ds/g/ctl", f"full {full}").status == 204
            for _ in range(2):
                ds.server.restart()
                assert ds.ask("HEAD", "/g/a").headers["Stream-TTL"] == "1000"


def records(ds: Durable) -> int:
    """Messages of the catalog, after a start."""
    ds.server.restart()
    assert ds.ask("HEAD", "/g/s0").headers["Stream-TTL"] == "1000"
    return int(ds.tree.ask("HEAD", "/ds/g/__ds").headers["Mqfs-Messages"])


def with_many_records(ds: Durable, streams: int) -> None:
    for number in range(streams):
        assert ds.create(f"/g/s{number}", "x", Stream_TTL="1000").status == 201
    assert ds.tree.post("/ds/g/.batch", NONSENSE * 100, Content_Type="application/x-ndjson").status == 201


@pytest.mark.process
@pytest.mark.parametrize("full", ["drop-new", "reject", "block"])
def test_a_catalog_that_has_room_for_a_part_is_kept(full: str) -> None:
    """Each start would add that part, to the end of the room."""
    bound = 256 << 10
    with short_folder() as folder:
        haste = json.dumps({"GROUP_BYTES": bound, "DURABLE_RECORDS": 10})
        ds = Durable(folder, at=free_port(), program=(sys.executable, "-m", "tests.http.hasty_server"), HASTE=haste)
        with ds.server:
            with_many_records(ds, 25)
            left = 3_500  # 10 records take about 1,700
            while (more := bound - ds.tree.get("/ds/g/.stats?streams=no").json["log_bytes"] - left) > 100:
                assert ds.tree.post("/ds/g/s0", bytes(min(more - 50, 10_000))).status == 201
            assert ds.tree.post("/ds/g/ctl", f"full {full}").status == 204
            assert [records(ds), records(ds)] == [125, 125]
            assert ds.append("/g/s0", bytes(1_000)).status == 204


@pytest.mark.process
def test_a_catalog_of_a_protected_group_does_not_grow_at_each_start() -> None:
    """Nothing of it may be dropped until `protect` is off."""
    with short_folder() as folder:
        haste = json.dumps({"DURABLE_RECORDS": 10})
        ds = Durable(folder, at=free_port(), program=(sys.executable, "-m", "tests.http.hasty_server"), HASTE=haste)
        with ds.server:
            with_many_records(ds, 25)
            assert ds.tree.post("/ds/g/ctl", "protect on").status == 204
            assert [records(ds), records(ds)] == [125, 125]
            assert ds.tree.post("/ds/g/ctl", "protect off").status == 204
            assert records(ds) == 25


@pytest.mark.process
def test_a_catalog_is_written_anew_beyond_the_rate_of_its_user() -> None:
    """It is the server that writes."""
    with short_folder() as folder:
        haste = json.dumps({"DURABLE_RECORDS": 10})
        program = (sys.executable, "-m", "tests.http.hasty_server")
        ds = Durable(folder, "--limit", "root messages=12", at=free_port(), program=program, HASTE=haste)
        with ds.server:
            with_many_records(ds, 25)
            assert records(ds) == 25


# ---------------------------------------------------------------- requests that are refused


@pytest.mark.process
@pytest.mark.parametrize("full", ["reject", "drop-new", "block"])
def test_a_stream_that_is_refused_is_not_made(full: str) -> None:
    with short_folder() as folder:
        haste = json.dumps({"GROUP_BYTES": 256 << 10})
        ds = Durable(folder, program=(sys.executable, "-m", "tests.http.hasty_server"), HASTE=haste)
        with ds.server:
            assert ds.create("/g/a").status == 201
            assert ds.tree.post("/ds/g/ctl", "full reject").status == 204
            while (status := ds.tree.post("/ds/g/a", bytes(50_000)).status) == 201:
                pass
            assert status == 507
            assert ds.tree.post("/ds/g/ctl", f"full {full}").status == 204
            assert ds.create("/g/new", bytes(50_000)).status in (503, 507)
            assert names(ds, "/g") == {"__ds", "a"}
            assert ds.tree.post("/ds/g/ctl", "clear").status == 204
            assert ds.create("/g/new", b"x").status == 201


@pytest.mark.process
@pytest.mark.parametrize("protect", ["on", "off"])
def test_a_refused_put_leaves_no_groups(protect: str) -> None:
    """Whatever it is refused for, also where new groups are protected."""
    with short_folder() as folder:
        ds = Durable(folder, "--limit", f"{os.geteuid()} kept=100K", "--default", f"protect {protect}")
        with ds.server:
            assert ds.create("/there/a", "x").status == 201
            for headers, name, body, status in (
                ({"Stream_Forked_From": "/there/none"}, "s", b"", 404),
                ({"Stream_Forked_From": "/there/a"}, "s", b"", 400),
                ({"Stream_Fork_Offset": "-1"}, "s", b"", 400),
                ({"Content_Type": "application/json"}, "s", b"{", 400),
                ({}, ".s", b"", 400),
                ({}, "ctl", b"", 400),
                ({}, "s", bytes(200_000), 429),
            ):
                for path in (f"/new/{name}", f"/there/new/in/{name}"):
                    assert ds.create(path, body, **headers).status == status, (path, headers)
                    assert names(ds, "") == {"there"}, (path, headers)
                    assert names(ds, "/there") == {"__ds", "a"}, (path, headers)


def names(ds: Durable, path: str) -> set[str]:
    return {entry["name"] for entry in ds.tree.get(f"/ds{path}/").json["entries"]}


@pytest.mark.process
def test_a_put_beside_refused_ones_is_made() -> None:
    """Though these take back the groups that they make, again and again."""
    with short_folder() as folder, ThreadPoolExecutor(3) as threads:
        ds, ends, at = Durable(folder), threading.Event(), 0

        def refused() -> set[int]:
            found = set[int]()
            while not ends.is_set():
                found.add(ds.create(f"/g{at}/in/a", "{", Content_Type="application/json").status)
            return found

        with ds.server:
            others = [threads.submit(refused) for _ in range(3)]
            try:
                for at in range(60):
                    while at % 2 and not names(ds, "") >= {f"g{at}"}:
                        pass  # it is there, and being taken back
                    assert ds.create(f"/g{at}/in/b", "x").status == 201
            finally:
                ends.set()
            assert [one.result() for one in others] == [{400}] * 3


@pytest.mark.process
def test_a_long_poll_is_answered_where_the_server_stops() -> None:
    with short_folder() as folder:
        ds = Durable(folder)
        with ds.server, ThreadPoolExecutor(1) as threads:
            assert ds.create("/g/a", "x").status == 201
            poll = threads.submit(ds.get, "/g/a?offset=now&live=long-poll")
            eventually(lambda: ds.tree.open_files("/ds/g", ".cursor"), "the poll waits")
            ds.server.stop(signal.SIGTERM)
            assert poll.result().status == 204


class FailingDisk(LyingDisk):
    """Whose syncs fail from some time on."""

    fails = False

    def fdatasync(self, descriptor: int) -> None:  # type: ignore[override]
        if self.fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().fdatasync(descriptor)


def test_a_repeat_is_not_acknowledged_after_the_disk_failed() -> None:
    disk = FailingDisk()
    subject = HttpSubject(DiskStore(PATH, disk=disk), table("g"))
    kind = {"Content_Type": "text/plain"}

    def produce() -> int:
        reply = subject.ask(0, "POST", "../in/s", b"x", Producer_Id="p", Producer_Epoch="0", Producer_Seq="0", **kind)
        return int(reply.status)

    try:
        assert subject.ask(0, "PUT", "../in/s", b"", **kind).status == 201
        disk.fails = True
        assert [produce() for _ in range(3)] == [500, 503, 503]
        assert subject.ask(0, "PUT", "../in/s", b"", **kind).status == 503
        assert subject.ask(0, "GET", "../in/s").status == 200
    finally:
        subject.abandon()


def test_a_put_that_was_cut_short_can_be_repeated() -> None:
    """Wherever it was: the groups that it made have their settings, and what is there of the stream is taken for it."""

    def put(disk: LyingDisk) -> tuple[int, bytes]:
        subject = HttpSubject(DiskStore(PATH, disk=disk), table("g"))
        try:
            reply = subject.ask(0, "PUT", "../new/in/s", b"hello", Content_Type="text/plain")
            return reply.status, subject.ask(0, "GET", "../new/in/s").body
        finally:
            subject.abandon()

    disk = RecordingDisk()
    assert put(disk) == (201, b"hello")
    found = [put(one) for one in disk.left]
    assert set(found) == {(201, b"hello"), (200, b"hello")}


def test_a_deleted_stream_goes_with_its_last_fork() -> None:
    """Also where a kill, or a power cut, came between the two, and where another program removed the fork."""
    text = {"Content_Type": "text/plain"}
    disk = RecordingDisk()

    @contextmanager
    def serving(disk: LyingDisk) -> Iterator[HttpSubject]:
        subject = HttpSubject(DiskStore(PATH, disk=disk), table("g"))
        try:
            yield subject
        finally:
            subject.abandon()

    def fork_and_delete(subject: HttpSubject) -> None:
        assert subject.ask(0, "PUT", "../in/s", b"old", **text).status == 201
        assert subject.ask(0, "PUT", "../in/f", b"", Stream_Forked_From="/in/s", **text).status == 201
        assert subject.ask(0, "DELETE", "../in/s").status == 204
        assert subject.ask(0, "PUT", "../in/s", b"new", **text).status == 409
        disk.left.clear()

    def is_free(subject: HttpSubject) -> bool:
        assert subject.ask(0, "PUT", "../in/s", b"new", **text).status == 201
        return bool(subject.ask(0, "GET", "../in/s").body == b"new")

    with serving(disk) as subject:
        fork_and_delete(subject)
        assert subject.ask(0, "DELETE", "../in/f").status == 204
        assert is_free(subject)
    for left in disk.left:
        with serving(left) as subject:
            if (
                subject.ask(0, "DELETE", "../in/f").status in (204, 404)
                and subject.ask(0, "GET", "../in/s").body != b"new"
            ):
                assert is_free(subject)
    disk = RecordingDisk()
    with serving(disk) as subject:
        fork_and_delete(subject)
        group = subject.group.groups["in"]
        subject.call(lambda: subject.tree.unlink(SUBJECT, group, "f"))
        assert subject.ask(0, "GET", "../in/s").status == 404
        assert is_free(subject)
