"""The same calls over a 9P connection: our client machine against our server machine, bytes between them in memory."""

from __future__ import annotations

import os
from typing import Any

from mqfs import errors
from mqfs.engine.tree.tree import Tree
from mqfs.errors import MqfsError
from mqfs.net.peer import Peer
from mqfs.ninep.client import machine
from mqfs.ninep.client.machine import Channel, ClientMachine, Procedure
from mqfs.ninep.codec import messages as m
from mqfs.ninep.server.session import Session
from mqfs.store.memory import MemoryStore
from tests.engine.subject import USER
from tests.models.pubsub import WAIT
from tests.support.clock import ManualClock
from tests.support.parked import parked

TEXTS = {
    kind.text: name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, MqfsError) and name not in ("MqfsError", "Damaged")
}


def name_of(error: MqfsError) -> str:
    """The class of an error that came as 9P text."""
    return next((name for text, name in TEXTS.items() if error.wire_text().startswith(text)), str(error))


class NineSubject:
    """Group `g` of a tree in memory, seen through one 9P2000 connection."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.connect(Tree(MemoryStore(), self.clock, owner=USER))
        self.do(self.caller.mkdir("g"))
        self.ctl_channel = self.do(self.caller.open("g/ctl", os.O_RDWR))
        self.ctl("sync off")

    def connect(self, tree: Tree) -> None:
        self.tree = tree
        self.session = Session(tree, Peer("test", 0, 0), lambda: None)
        self.caller = ClientMachine()
        self.answers: list[tuple[int, Any]] = []
        self.replies: dict[int, Any] = {}
        self.waits: dict[int, tuple[int, str | None]] = {}  # tag -> (key of the wait, handle of a read)
        self.handles: dict[str, Channel] = {}
        self.do(self.caller.connect("root"))

    # ------------------------------------------------------------ bytes between the machines

    def pump(self) -> None:
        self.session.receive(self.caller.take())
        for tag, reply in self.caller.receive(b"".join(self.session.take())):
            if tag in self.waits:
                wait, key = self.waits.pop(tag)
                self.answers.append((wait, self.result(reply, key)))
            else:
                self.replies[tag] = reply

    def ask(self, request: Any) -> Any:
        tag = self.caller.call(request)
        self.pump()
        return self.replies.pop(tag)

    def do(self, procedure: Procedure[Any]) -> Any:
        try:
            request = next(procedure)
            while True:
                try:
                    reply = machine.expect(request, self.ask(request))
                except MqfsError as error:
                    request = procedure.throw(error)
                else:
                    request = procedure.send(reply)
        except StopIteration as done:
            return done.value

    def try_(self, procedure: Procedure[Any]) -> Any:
        try:
            self.do(procedure)
        except MqfsError as error:
            return name_of(error)
        return None

    def result(self, reply: Any, key: str | None) -> Any:
        try:
            machine.check(reply)
        except MqfsError as error:
            return name_of(error)
        if key is None:
            return reply.count
        self.handles[key].took(len(reply.data), 1 << 30)
        return reply.data

    # ------------------------------------------------------------ the calls of a subject

    def create(self, name: str) -> Any:
        return self.try_(self._create(name))

    def _create(self, name: str) -> Procedure[None]:
        channel = yield from self.caller.create(f"g/{name}", os.O_RDWR)
        yield from self.caller.clunk(channel.fid)

    def remove(self, name: str) -> Any:
        return self.try_(self.caller.remove(f"g/{name}"))

    def rename(self, old: str, new: str) -> Any:
        return self.try_(self.caller.rename(f"g/{old}", new))

    def ctl(self, *lines: str) -> Any:
        got = self.try_(self.ctl_channel.write("".join(f"{line}\n" for line in lines).encode()))
        if got is not None:
            self.do(self.ctl_channel.read(4096))  # why it was refused
        return got

    def tick(self, seconds: float) -> None:
        self.clock.forward(seconds)
        group = self.tree.root.groups["g"]
        self.tree.dirty_groups.add(group)
        group.unblock()
        self.tree.tick()

    def open(self, key: str, name: str, flags: int) -> Any:
        try:
            name = {"cursor": ".cursor"}.get(name, name)
            self.handles[key] = self.do(self.caller.open(f"g/{name}", flags))
        except MqfsError as error:
            return name_of(error)
        return None

    def close(self, key: str) -> None:
        self.do(self.caller.clunk(self.handles.pop(key).fid))

    def read(self, wait: int, key: str, count: int) -> Any:
        channel = self.handles[key]
        return self._send(wait, key, m.Tread(0, channel.fid, channel.offset, count))

    def write(self, wait: int, key: str, body: bytes) -> Any:
        return self._send(wait, None, m.Twrite(0, self.handles[key].fid, 0, body))

    def put(self, wait: int, text: bytes) -> Any:
        if ".put" not in self.handles:
            self.handles[".put"] = self.do(self.caller.open("g/.put", os.O_WRONLY))
        return self.write(wait, ".put", text)

    def _send(self, wait: int, key: str | None, request: Any) -> Any:
        tag = self.caller.call(request)
        self.waits[tag] = (wait, key)
        self.pump()
        for i, (other, result) in enumerate(self.answers):
            if other == wait:
                del self.answers[i]
                return result
        return WAIT

    def command(self, key: str, line: str) -> Any:
        return self.try_(self.handles[key].write(f"{line}\n".encode()))

    def cancel(self, wait: int) -> bool:
        tag = next(tag for tag, (other, _) in self.waits.items() if other == wait)
        self.caller.flush(tag)
        self.pump()
        return self.waits.pop(tag, None) is not None

    def settle(self) -> None:
        self.pump()

    def end(self) -> None:
        for key in list(self.handles):
            self.close(key)
        for name in list(self.tree.root.groups["g"].streams):
            self.remove(name)
        self.do(self.caller.clunk(self.ctl_channel.fid))
        assert self.tree.open_files.count == 0
        assert parked(self.tree) == 0
        self.session.close()
        self.tree.close()
