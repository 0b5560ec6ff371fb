"""A replicated log in NATS JetStream: a stream of two subjects, and an object store for its checkpoints.

    stream     mqfs-NAME     mqfs.NAME.log  frames        mqfs.NAME.own  takeovers
    objects    mqfs-NAME     in JetStream's object store, with their names in base64
                             $O.mqfs-NAME.M.OBJECT  size, number of chunks   $O.mqfs-NAME.C.OBJECT.UPLOAD  chunks
    standbys   mqfs.NAME.standby   what they have on their disks: plain messages, not kept

Each append has two conditions: the last number of the stream, and that of the newest takeover. nats-py works on
asyncio, so it has a thread of its own. A leader that was cut off may refuse appends, or answer reads with old data;
log.py expects that.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import queue
import re
import threading
import urllib.parse
import uuid
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from hashlib import sha256
from typing import Any, TypeVar, cast

import nats
import nats.errors
import nats.js.errors
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.js.api import (
    ConsumerConfig,
    DeliverPolicy,
    DiscardPolicy,
    ObjectInfo,
    ObjectMetaOptions,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)
from nats.js.client import JetStreamContext

from mqfs import limits
from mqfs.errors import BadReplica
from mqfs.replica.log import LogRecord, NoAnswer, Refused, Report

T = TypeVar("T")
LEAST_VERSION = (2, 11, 0)  # the condition of another subject; 2.9.15 to 2.9.20 did not even serialize them
_WRONG_LAST = (10071, 10164)
_NO_STREAM = 10059  # confirmed by a quorum, so it is final
_HEADER_BYTES = 1_024  # of an append, at most
_ARRIVED = 32  # records passed on and not read yet: while there are as many nats-py gets no more
_CHUNK_BYTES = 128 << 10  # of an object
_STALE = 100  # uploads examined in one call
_AT_ONCE = 16  # objects deleted at once
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_EXPECT = "nats://HOST[:PORT][,HOST...]/NAME"


class _Loop:
    """An asyncio loop on a thread of its own, for calls of other threads."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="jetstream", daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T], within_s: float = limits.REPLICA_CALL_S) -> T:
        """Run a coroutine and return its result. Raises NoAnswer if there is none in that time, or an inconclusive
        error; Refused; BadReplica if the stream does not exist any more."""
        future = asyncio.run_coroutine_threadsafe(work, self.loop)
        try:
            return future.result(within_s)
        except nats.js.errors.APIError as error:
            if error.err_code in _WRONG_LAST:
                raise Refused from None
            if error.err_code == _NO_STREAM:
                raise BadReplica("no stream: the engine lost what it confirmed") from None
            raise NoAnswer(f"{error.description} ({error.err_code})") from None
        except TimeoutError:
            future.cancel()
            raise NoAnswer(f"no answer in {within_s:.0f} s") from None
        except (nats.errors.Error, OSError, asyncio.CancelledError) as error:
            raise NoAnswer(_reason(error)) from None

    def begin(self, work: Coroutine[Any, Any, object]) -> Future[object]:
        """Start a coroutine without waiting for its result."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(_cancel_all(), self.loop).result()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


async def _cancel_all() -> None:
    """Cancel the client's own tasks, and those of abandoned calls."""
    tasks = asyncio.all_tasks() - {cast("asyncio.Task[Any]", asyncio.current_task())}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()).removeprefix("nats: ")
    return text or type(error).__name__


class JetStreamLog:
    """See `ReplicatedLog` in log.py."""

    def __init__(self, url: str, *, create: bool = True) -> None:
        """Connect. `create`: make the stream if it does not exist. Raises BadReplica."""
        self._create, self.pace_s = create, limits.REPLICA_PACE_S
        servers, self._stem, replicas, credentials = parse(url)
        self.name = f"{url.partition('://')[0]}://{','.join(map(_without_user, servers))}/{self._stem}"
        if credentials is not None and not os.access(credentials, os.R_OK):
            raise BadReplica(f"--replica {self.name}: credentials {credentials!r}: cannot be read (expected a file)")
        self._stream, self._prefix = f"mqfs-{self._stem}", f"mqfs.{self._stem}"
        self._loop = _Loop()
        self._following: Any = None  # the subscription of `read`
        self._arrived: queue.SimpleQueue[LogRecord] = queue.SimpleQueue()  # of that subscription
        self._passing: Future[object] = Future()  # the task that fills it
        self._follows = 0  # the number before its next record
        self._reports: dict[str, Report] | None = None  # None: not subscribed yet
        try:
            self._client: Client = self._connect(servers, credentials)
        except Exception as error:  # also errors of nats-py about a file of credentials
            self._loop.close()
            raise BadReplica(f"--replica {self.name}: not reachable: {_reason(error)}") from None
        self._js: JetStreamContext = self._client.jetstream(timeout=limits.REPLICA_CALL_S)
        try:
            self._check_version()
            self._open_stream(replicas or (3 if len(servers) >= 3 else 1))
            self.objects = JetStreamObjects(self._loop, self._js, self._stream, self._replicas)
        except NoAnswer as error:
            self.close()
            raise BadReplica(f"--replica {self.name}: JetStream not usable: {error}") from None
        except BaseException:
            self.close()
            raise

    def _connect(self, servers: Sequence[str], credentials: str | None) -> Client:
        said = list[str]()

        async def note(error: Exception) -> None:
            """Record an error while connecting. Later errors are raised by the calls that fail; nats-py itself only
            reconnects. An error text of a server is kept rather than the end of the connection, which may be reported
            after it."""
            if not (said and isinstance(error, OSError)):
                said[:] = [_reason(error)]

        more: dict[str, Any] = {} if credentials is None else {"user_credentials": credentials}
        connecting = nats.connect(
            list(servers), name=f"mqfs {self._stem}", connect_timeout=2, max_reconnect_attempts=-1,
            reconnect_time_wait=0.2, allow_reconnect=True, error_cb=note, ping_interval=2, max_outstanding_pings=2,
            pending_size=8 << 20, **more,
        )  # fmt: skip
        return self._loop.call(_first_answer(connecting, said))

    def _check_version(self) -> None:
        version = self._version()
        if version < LEAST_VERSION:
            found, least = (".".join(map(str, numbers)) for numbers in (version, LEAST_VERSION))
            raise BadReplica(f"--replica {self.name}: nats-server {found} cannot fence (expected {least} or newer)")
        least_payload = limits.REPLICA_FRAME_BYTES + _HEADER_BYTES
        if (most := self._client.max_payload) < least_payload:
            raise BadReplica(f"--replica {self.name}: max_payload {most} (expected {least_payload} or more)")

    def _version(self) -> tuple[int, int, int]:
        version = self._client.connected_server_version
        return version.major, version.minor, version.patch

    def _open_stream(self, replicas: int) -> None:
        subjects = [f"{self._prefix}.log", f"{self._prefix}.own"]
        config = StreamConfig(
            name=self._stream, subjects=subjects, storage=StorageType.FILE, num_replicas=replicas,
            retention=RetentionPolicy.LIMITS, discard=DiscardPolicy.NEW, deny_delete=True,
        )  # fmt: skip
        found = self._loop.call(self._find_stream(config))
        if found.storage != StorageType.FILE or sorted(found.subjects or []) != subjects:
            raise BadReplica(
                f"--replica {self.name}: stream {self._stream} is foreign (expected file storage, {subjects})"
            )
        if (found.max_age or 0) > 0 or (found.max_msgs or -1) > 0 or found.discard != DiscardPolicy.NEW:
            raise BadReplica(f"--replica {self.name}: stream {self._stream}: drops records (expected no limits)")
        self._replicas = found.num_replicas or 1

    async def _find_stream(self, config: StreamConfig) -> StreamConfig:
        try:
            return (await self._js.stream_info(self._stream)).config
        except nats.js.errors.NotFoundError:
            if not self._create:
                raise BadReplica(f"{self.name}: no log (expected one that a server has begun)") from None
            return (await self._js.add_stream(config)).config

    def append(self, data: bytes, after: int, own: int, *, takeover: bool) -> None:
        conditions = {
            "Nats-Expected-Last-Sequence": str(after),
            "Nats-Expected-Last-Subject-Sequence": str(own),
            "Nats-Expected-Last-Subject-Sequence-Subject": f"{self._prefix}.own",
        }
        subject = f"{self._prefix}.own" if takeover else f"{self._prefix}.log"
        if not self._client.is_connected:
            raise NoAnswer("not connected")  # otherwise nats-py would keep it, and send it much later
        publish = self._js.publish(
            subject, data, timeout=limits.REPLICA_CALL_S, stream=self._stream, headers=conditions
        )
        answer = self._loop.call(publish, limits.REPLICA_CALL_S + 1)
        if answer.seq != after + 1:
            raise BadReplica(f"{self.name}: appended as {answer.seq}, not {after + 1}: the conditions are not checked")

    def get(self, number: int) -> bytes | None:
        return self._loop.call(self._get(number)) if number else None

    async def _get(self, number: int) -> bytes | None:
        try:
            return (await self._js.get_msg(self._stream, seq=number)).data or b""
        except nats.js.errors.NotFoundError:
            return None

    def newest(self, after: int) -> LogRecord | None:
        state = self._loop.call(self._js.stream_info(self._stream)).state
        while state.last_seq > after and state.messages:
            if (data := self.get(state.last_seq)) is not None:  # otherwise it was trimmed meanwhile
                return LogRecord(state.last_seq, data)
            state = self._loop.call(self._js.stream_info(self._stream)).state
        return None

    def read(self, after: int, wait_s: float) -> Sequence[LogRecord]:
        if self._following is None or self._follows != after:
            self._follow(after)
        records = self._take(wait_s)
        if not records and self.newest(after) is not None:
            records = self._take(1.0)  # it is about to arrive
            if not records:
                self._stop_following()  # the consumer was removed, or the next record was trimmed
        self._follows = records[-1].number if records else after
        return records

    def _follow(self, after: int) -> None:
        self._stop_following()
        self._arrived = queue.SimpleQueue()
        config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=after + 1)
        self._following = self._loop.call(
            self._js.subscribe(
                f"{self._prefix}.>", stream=self._stream, config=config, ordered_consumer=True,
                pending_bytes_limit=64 << 20,
            )
        )  # fmt: skip
        self._passing = self._loop.begin(_pass_on(self._following, self._arrived))
        self._follows = after

    def _stop_following(self) -> None:
        following, self._following = self._following, None
        self._passing.cancel()
        if following is not None:
            with contextlib.suppress(NoAnswer):  # then it ends with the connection
                self._loop.call(following.unsubscribe())

    def _take(self, wait_s: float) -> list[LogRecord]:
        """Return the records that arrived; wait for the first one at most `wait_s` seconds."""
        records: list[LogRecord] = []
        with contextlib.suppress(queue.Empty):
            records.append(self._arrived.get(timeout=wait_s))
            while len(records) < _ARRIVED:
                records.append(self._arrived.get_nowait())
        return records

    def trim(self, before: int) -> None:
        if before > 1:  # without a number all would be purged
            self._loop.call(self._js.purge_stream(self._stream, seq=before, subject=f"{self._prefix}.log"))

    def report(self, name: str, report: Report) -> None:
        if self._client.is_connected:
            line = b"%b %b" % (name.encode(), report.encode())
            self._loop.begin(self._client.publish(f"{self._prefix}.standby", line))

    async def _on_report(self, message: Msg) -> None:
        begin, _, rest = message.data.partition(b" ")
        name, report = begin.decode(errors="replace"), Report.decode(rest)
        if self._reports is not None and _NAME.fullmatch(name) and report is not None:
            self._reports[name] = report
            if len(self._reports) > limits.REPLICA_REPORTS:
                del self._reports[min(self._reports, key=self._reports.__getitem__)]

    def reports(self) -> dict[str, Report]:
        if self._reports is None:
            self._loop.call(self._client.subscribe(f"{self._prefix}.standby", cb=self._on_report))
            self._reports = {}
        return dict(self._reports)

    def promises(self) -> Sequence[str]:
        version = ".".join(map(str, self._version()))
        copies = "no other copy: one nats-server has it" if self._replicas == 1 else f"{self._replicas} replicas"
        return [
            f"nats-server {version}, {copies}",
            'a power cut of most of them may lose its sync_interval, unless that is "always" or --confirm is 1',
        ]

    def close(self) -> None:
        self._stop_following()
        with contextlib.suppress(NoAnswer):
            self._loop.call(self._client.close())
        self._loop.close()


async def _pass_on(following: Any, arrived: queue.SimpleQueue[LogRecord]) -> None:
    """Pass on the records of a subscription, until it ends. There is no callback: nats-py requests more from the server
    when records are taken, not when they arrive."""
    with contextlib.suppress(nats.errors.Error):
        while True:
            message = await following.next_msg(timeout=None)
            arrived.put(LogRecord(message.metadata.sequence.stream, message.data))
            while arrived.qsize() >= _ARRIVED:
                await asyncio.sleep(0.002)


async def _first_answer(connecting: Coroutine[Any, Any, Client], said: Sequence[str]) -> Client:
    """Return a connection, or raise NoAnswer with the last text in `said`: nats-py itself retries for ever."""
    try:
        return await asyncio.wait_for(connecting, limits.REPLICA_CALL_S - 1)
    except TimeoutError:
        raise NoAnswer(said[-1] if said else f"no answer in {limits.REPLICA_CALL_S - 1:.0f} s") from None


class JetStreamObjects:
    """JetStream's object store. See `Objects` in log.py."""

    def __init__(self, loop: _Loop, js: JetStreamContext, bucket: str, replicas: int) -> None:
        self._loop, self._js, self._bucket, self._replicas = loop, js, bucket, replicas
        self._stream, self._marks, self._chunks = f"OBJ_{bucket}", f"$O.{bucket}.M.", f"$O.{bucket}.C."
        loop.call(self._open())

    async def _open(self) -> None:
        try:
            await self._js.object_store(self._bucket)
        except nats.js.errors.NotFoundError:
            await self._js.create_object_store(self._bucket, storage=StorageType.FILE, replicas=self._replicas)

    def put(self, name: str, data: bytes) -> None:
        try:
            self._loop.call(self._put(name, data), 6 * limits.REPLICA_CALL_S)
        except Refused:
            raise NoAnswer(f"upload of {name}: chunks removed (tried again)") from None

    async def _put(self, name: str, data: bytes) -> None:
        """Upload an object as nats-py does, except for an early end. The `put` of nats-py leaves the chunks when it is
        cancelled. It also removes them when publishing the name is not answered, although the name may exist; here such
        a name keeps its chunks."""
        info = ObjectInfo(
            name=name, bucket=self._bucket, nuid=f"{_token(name)}.{uuid.uuid4().hex}", size=len(data),
            chunks=-(-len(data) // _CHUNK_BYTES), digest=_digest(data), mtime=datetime.now(UTC).isoformat(),
            options=ObjectMetaOptions(max_chunk_size=_CHUNK_BYTES),
        )  # fmt: skip
        mark = self._marks + _token(name)
        before, last = await self._find(mark), 0
        try:
            for at in range(0, len(data), _CHUNK_BYTES):
                last = (await self._js.publish(self._chunks + info.nuid, data[at : at + _CHUNK_BYTES])).seq
        except BaseException:
            with contextlib.suppress(Exception):  # otherwise `remove_stale_uploads` removes them
                await self._purge(self._chunks + info.nuid)
            raise
        headers = {"Nats-Rollup": "sub"}
        if last:
            headers["Nats-Expected-Last-Subject-Sequence"] = str(last)
            headers["Nats-Expected-Last-Subject-Sequence-Subject"] = self._chunks + info.nuid
        await self._js.publish(mark, json.dumps(info.as_dict()).encode(), headers=headers)
        if before is not None:
            await self._purge(self._chunks + before.nuid)

    async def _find(self, mark: str) -> ObjectInfo | None:
        try:
            info = ObjectInfo.from_response(json.loads((await self._js.get_last_msg(self._stream, mark)).data or b""))
        except nats.js.errors.NotFoundError:
            return None
        except (ValueError, TypeError) as error:
            raise BadReplica(f"{mark}: unreadable: {error}") from None
        return None if info.deleted else info

    async def _purge(self, subject: str) -> None:
        await self._js.purge_stream(self._stream, subject=subject)

    async def _subjects(self, wanted: str) -> tuple[dict[str, int], datetime]:
        """Return the number of messages of each subject, and the server's time. The leader has all of them; a consumer
        would read the store of one peer, which may lack some. Raises NoAnswer."""
        found, before = dict[str, int](), None
        while True:
            request = json.dumps({"subjects_filter": wanted, "offset": len(found)}).encode()
            answer = await self._js._api_request(
                f"$JS.API.STREAM.INFO.{self._stream}", request, timeout=limits.REPLICA_CALL_S
            )
            state = answer["state"]
            if before not in (None, version := (state["last_seq"], state["messages"])):
                raise NoAnswer("objects changed while they were listed")
            before, page = version, state.get("subjects") or {}
            found |= page
            if not page or len(found) >= answer.get("total", 0):
                return found, datetime.fromisoformat(answer["ts"])

    def get(self, name: str) -> bytes | None:
        return self._loop.call(self._get(name), 6 * limits.REPLICA_CALL_S)

    async def _get(self, name: str) -> bytes | None:
        mark = self._marks + _token(name)
        info = await self._find(mark)
        if info is None or not info.chunks:
            return None if info is None else b""
        chunks, size = self._chunks + str(info.nuid), info.chunks
        if (await self._subjects(chunks))[0].get(chunks, 0) < size:
            after = await self._find(mark)
            return None if after is None or after.nuid == info.nuid else await self._get(name)  # it was replaced
        reading = await self._js.subscribe(chunks, stream=self._stream, ordered_consumer=True)
        try:
            data = b"".join([(await reading.next_msg(limits.REPLICA_CALL_S)).data for _ in range(size)])
        finally:
            await reading.unsubscribe()
        if _digest(data) != info.digest:
            raise BadReplica(f"{name}: wrong check sum (expected {info.digest})")
        return data

    def list(self, prefix: str, after: str = "", most: int = 0) -> Sequence[str]:
        """See `Objects`. An object that another client of NATS deleted is listed until it is deleted here, too."""
        marks, _ = self._loop.call(self._subjects(f"{self._marks}>"), 6 * limits.REPLICA_CALL_S)
        names = (_name_of(mark.removeprefix(self._marks)) for mark in marks)
        return sorted(name for name in names if name.startswith(prefix) and name > after)[: most or None]

    def delete(self, *names: str) -> None:
        for begin in range(0, len(names), _AT_ONCE):
            self._loop.call(self._delete(names[begin : begin + _AT_ONCE]), 6 * limits.REPLICA_CALL_S)

    async def _delete(self, names: Sequence[str]) -> None:
        await asyncio.gather(*map(self._delete_one, names))

    async def _delete_one(self, name: str) -> None:
        """Delete without looking at what is there, so that the next call completes one that ended early."""
        await self._purge(self._marks + _token(name))
        await self._purge(f"{self._chunks}{_token(name)}.>")

    def remove_stale_uploads(self) -> None:
        self._loop.call(self._remove_stale(), 6 * limits.REPLICA_CALL_S)

    async def _remove_stale(self) -> None:
        """Purge chunks that belong to no object: each upload's subject has the name of its object."""
        subjects, now = await self._subjects(f"$O.{self._bucket}.>")
        uploads = [tuple(it.split(".")[3:]) for it in subjects if it.startswith(self._chunks) and it.count(".") == 4]
        count = Counter(token for token, _ in uploads)
        lone = sorted(it for it in uploads if count[it[0]] > 1 or self._marks + it[0] not in subjects)
        for token, upload in lone[:_STALE]:
            chunks = f"{self._chunks}{token}.{upload}"
            if await self._age_s(chunks, now) > limits.REPLICA_UPLOAD_S:
                info = await self._find(self._marks + token)  # it may have appeared meanwhile
                if info is None or info.nuid != f"{token}.{upload}":
                    await self._purge(chunks)

    async def _age_s(self, subject: str, now: datetime) -> float:
        """Return the age of the newest chunk, in seconds."""
        try:
            made = (await self._js.get_last_msg(self._stream, subject)).time
        except nats.js.errors.NotFoundError:
            return 0.0
        return (now - made).total_seconds() if made is not None else 0.0


def _token(name: str) -> str:
    """Return the name of an object as it is in a subject."""
    return base64.urlsafe_b64encode(name.encode()).decode()


def _name_of(token: str) -> str:
    """Return the name in a subject; "" if it is not a name."""
    try:
        return base64.urlsafe_b64decode(token).decode()
    except ValueError:
        return ""


def _digest(data: bytes) -> str:
    return f"SHA-256={base64.urlsafe_b64encode(sha256(data).digest()).decode()}"


def parse(url: str) -> tuple[list[str], str, int, str | None]:
    """Parse a URL: servers, name, number of replicas (0: not given) and file of credentials. Raises BadReplica."""
    scheme, _, rest = url.partition("://")
    hosts, _, tail = rest.partition("/")
    name, _, query = tail.partition("?")
    try:
        options = dict(urllib.parse.parse_qsl(query, strict_parsing=True)) if query else {}
        replicas = int(options.pop("replicas", "0"))
    except ValueError:
        raise BadReplica(
            f"--replica: invalid options {query!r} (expected replicas=1, 3 or 5, credentials=FILE)"
        ) from None
    credentials = options.pop("credentials", None)
    if options or replicas not in (0, 1, 3, 5):
        raise BadReplica(f"--replica: invalid options {query!r} (expected replicas=1, 3 or 5, credentials=FILE)")
    if not _NAME.fullmatch(name):
        raise BadReplica(f"--replica: invalid name {name!r} (expected {_EXPECT}; letters, digits, - and _)")
    servers = [f"{scheme}://{host}" for host in hosts.split(",")]
    for server in servers:
        _check_server(server)
    return servers, name, replicas, credentials


def _check_server(server: str) -> None:
    try:
        parts = urllib.parse.urlsplit(server)
        valid = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        valid = False
    if not valid:
        raise BadReplica(f"--replica: invalid server {_without_user(server)!r} (expected {_EXPECT})")


def _without_user(server: str) -> str:
    return server.partition("://")[2].rpartition("@")[2]
