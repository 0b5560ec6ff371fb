"""`mqfs bridge fsq`: the parts of a bridge, each on a thread, and their end."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator

import attrs

from mqfs import limits
from mqfs.bridge.exporter import FileWriter, Lifetimes, MultiExporter, SinglesExporter
from mqfs.bridge.folder import Changes, Folder
from mqfs.bridge.importer import Importer, Seen, Singles
from mqfs.bridge.link import GroupLink
from mqfs.bridge.names import Origin, Topics
from mqfs.bridge.singles import SinglesImporter
from mqfs.errors import BadConfig, Interrupted
from mqfs.syntax.duration import parse_duration, print_duration
from mqfs.syntax.patterns import compile_selection

log = logging.getLogger("mqfs.bridge")

FIRST_LOOK_S = 0.005  # for parked readers, after one was served; then twice as long each time, up to the poll


@attrs.frozen(kw_only=True)
class Options:
    """Options of the command. Durations in ns."""

    folder: str
    address: str
    group: str
    topics: Topics
    inwards: bool = True
    outwards: bool = True
    singles: bool = True
    sync: bool = True
    expire: bool = False
    patterns: tuple[str, ...] = ()
    poll: int = 10**9
    window: int = 600 * 10**9
    multi_ttl: int = 60 * 10**9
    single_ttl: int = 3_600 * 10**9
    state: str = ""
    consumer: str = "fsq"
    user: str = ""
    token: str = ""


def run(options: Options) -> int:
    """Carry messages until SIGTERM or SIGINT. Raises BadConfig, MqfsError, OSError."""
    bridge = Bridge(options)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: bridge.stop())
    return bridge.run()


class Bridge:
    """One folder and one group."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._stopping = threading.Event()
        self._wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._failure: BaseException | None = None
        self._folder = Folder(options.folder, sync=options.sync)
        self._link = GroupLink(
            options.address, options.group, user=options.user, token=options.token, stopping=self._stopping
        )
        stats = self._link.stats()
        self._origin = Origin(stats["store"], stats["group"])
        self._selects = compile_selection(options.patterns, self._link.words())
        self._singles: Singles = {}  # found, not imported
        self._found = threading.Event()  # there may be some
        self._check()
        if os.geteuid() == 0 and (owner := self._folder.owner) != 0:
            log.warning(
                "%s: belongs to uid %d, and the bridge runs as root (expected that user, who needs no more rights)",
                options.folder, owner,
            )  # fmt: skip

    def _check(self) -> None:
        """Raises BadConfig where the group's settings cannot keep the guarantees."""
        options, settings = self._options, self._link.settings()
        self._deliver_one = settings["deliver"] == "one"
        if not options.inwards:
            return
        if parse_duration(settings["dedup"]) < options.window:
            window = print_duration(options.window)
            raise BadConfig(f"{options.group}: dedup {settings['dedup']} (expected {window} or more, or --window)")
        if options.singles and options.sync and settings["sync"] != "always":
            raise BadConfig(f"{options.group}: sync {settings['sync']} (expected always, --no-singles, or --no-sync)")

    # ------------------------------------------------------------ threads

    def run(self) -> int:
        if self._options.outwards:
            self._writer().remove_leftovers()
        parts = [*self._inwards(), *self._outwards()]
        threads = [threading.Thread(target=self._guard, args=(part,), name=part.__name__) for part in parts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        self._link.close()
        if self._failure is not None:
            raise self._failure
        return 0

    def stop(self) -> None:
        """End it, soon: if a part waits for a disk or a server that does not answer, by SIGALRM, as a bridge may be
        killed at any moment. A signal handler may call it."""
        signal.setitimer(signal.ITIMER_REAL, limits.BRIDGE_STOP_S)
        self._stopping.set()
        self._found.set()
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake[1], b"\0")

    def _guard(self, part: Callable[[], None]) -> None:
        try:
            part()
        except Interrupted:
            pass
        except BaseException as error:
            self._failure = self._failure or error
            self.stop()

    def _inwards(self) -> Iterator[Callable[[], None]]:
        if self._options.inwards:
            yield self._import
            if self._options.singles:
                yield self._import_singles

    def _outwards(self) -> Iterator[Callable[[], None]]:
        if self._options.outwards:
            if not self._deliver_one:
                yield self._export
            if self._options.singles:
                yield self._export_singles

    # ------------------------------------------------------------ what each does

    def _import(self) -> None:
        options, closing = self._options, contextlib.closing
        state = options.state or default_state(self._folder.path, self._origin)
        singles = self._singles if options.singles else None
        with closing(Seen(state)) as seen, closing(Changes(self._folder)) as changes:
            importer = Importer(
                self._folder, self._link, options.topics, self._origin, seen,
                changes=changes, selects=self._selects, singles=singles, expire=options.expire,
            )  # fmt: skip
            while not self._stopping.is_set():
                importer.scan(changes.wait(options.poll / 10**9, self._wake[0]))
                if any(self._singles.values()):
                    self._found.set()

    def _import_singles(self) -> None:
        importer = SinglesImporter(self._folder, self._link, self._singles, self._options.consumer)
        pause_s, poll_s = 0.0, self._options.poll / 10**9
        while not self._stopping.is_set():
            if not any(self._singles.values()):
                self._found.wait()
                self._found.clear()
                pause_s = 0.0
            pause_s = 0.0 if importer.run() else min(max(2 * pause_s, FIRST_LOOK_S), poll_s)
            self._stopping.wait(pause_s)

    def _export(self) -> None:
        options, link = self._options, self._link
        MultiExporter(link, self._writer(), options.consumer, self._selects, options.poll / 10**9).run()

    def _export_singles(self) -> None:
        exporter = SinglesExporter(self._link, self._writer(), self._selects)
        while not self._stopping.is_set():
            if not exporter.run():
                self._stopping.wait(self._options.poll / 10**9)

    def _writer(self) -> FileWriter:
        lifetimes = Lifetimes(self._options.multi_ttl // 10**6, self._options.single_ttl // 10**6)
        return FileWriter(self._folder, self._link, self._options.topics, self._origin, lifetimes)


def default_state(folder: str, origin: Origin) -> str:
    """The state file of the bridges between a folder and a group."""
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    digest = hashlib.sha256(f"{folder}\0{origin.store}\0{origin.group}".encode()).hexdigest()[:16]
    return f"{base}/mqfs/fsq-{digest}"
