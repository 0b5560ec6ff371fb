"""`mqfs mcp`: a group as tools of the Model Context Protocol on standard input and output, for agents.

    send to a stream        a publish
    wait on a stream        a claim of a consumer with the stream's name; `ack`, `nack` and `dead` settle it by its id
    read                    more of a claimed body than one answer shows
    list, tail, history     what is there, settled messages too; a stream is a resource, mqfs://stream/NAME

Claims belong to this process: where it ends, or its agent, they are requeued at once.
"""

from __future__ import annotations

import codecs
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import wraps
from typing import Any, ParamSpec, TypeAlias, TypeVar
from weakref import WeakValueDictionary

import anyio
import click

from mqfs.cli import common
from mqfs.client import Message, aio
from mqfs.client.aio import AsyncClaim, AsyncClaims, AsyncGroup
from mqfs.errors import (
    NOT_INSTALLED,
    BadConfig,
    BadName,
    BadRequest,
    Disconnected,
    MqfsError,
    NotFound,
    OverLimit,
    Stale,
    TooLong,
    ungrouped,
)
from mqfs.model import NEVER
from mqfs.syntax.names import stream_name

P = ParamSpec("P")
T = TypeVar("T")
Rows: TypeAlias = list[dict[str, Any]]
GROUP = "agents"
SETTINGS = ("replay all", "ttl 7d", "retries 5")
OPEN, CLAIMS = 64, 256  # streams waited on, claims
MESSAGES, BODY_BYTES = 100, 65_536  # of one answer: of all bodies together
SENT_BYTES = 1_000_000  # of a body
MOST_S = 3_600
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
INSTRUCTIONS = """Messages between programs, kept on disk. `wait` claims a message of a stream: it is yours
alone until you `ack` it when its work is done, `nack` it to have it delivered again, or give it up with `dead`.
Unsettled claims go to others when you end. `tail` and `history` look without claiming."""


@click.command()
@click.option(
    "--at", "address", callback=common.addresses, metavar="ADDRESS",
    help="Address of the server; else $MQFS_ADDRESS, ./mqfs.sock.",
)  # fmt: skip
@click.option("--group", default=GROUP, metavar="PATH", show_default=True, help="Group; made where it is missing.")
@click.option("--read-only", is_flag=True, help="Offer the tools that only look.")
def mcp(address: str | None, group: str, read_only: bool) -> int:
    """Serve a group to an agent by the Model Context Protocol, on standard input and output.

    MQFS_TOKEN in the environment is the token of a server over TCP or TLS.
    """
    try:
        from mcp.server.mcpserver import MCPServer
        from mcp.server.mcpserver.exceptions import ToolError
    except ImportError:
        raise BadConfig(f"mcp: {NOT_INSTALLED.format('mcp')}") from None
    import asyncio

    def end(desk: Desk, number: int) -> None:
        """Release the claims, and end by the signal: the thread that waits for input cannot be cancelled."""
        for one in ENDING:  # the next one ends this process at once
            signal.signal(one, signal.SIG_DFL)
        desk.closing = task = asyncio.ensure_future(desk.close())
        task.add_done_callback(lambda _: os.kill(os.getpid(), number))

    async def run() -> None:
        token = os.environ.get("MQFS_TOKEN", "")
        async with aio.connect(address, token=token) as client:
            desk = Desk(await _open(client, group))
            server = MCPServer("mqfs", instructions=INSTRUCTIONS, log_level="WARNING")
            looks: list[Callable[..., Awaitable[Any]]] = [desk.list, desk.tail, desk.history]
            works: list[Callable[..., Awaitable[Any]]] = (
                [] if read_only else [desk.send, desk.wait, desk.read, desk.ack, desk.nack, desk.dead]
            )
            for tool in (*works, *looks):
                server.add_tool(_answered(tool, ToolError))
            server.resource("mqfs://stream/{stream}", mime_type="application/json")(_answered(desk.tail_of, ToolError))
            for number in ENDING:
                if signal.getsignal(number) != signal.SIG_IGN:
                    asyncio.get_running_loop().add_signal_handler(number, end, desk, number)
            try:
                await server.run_stdio_async()
            except BaseExceptionGroup as failed:  # of its tasks, as where standard output cannot be written
                raise ungrouped(failed) from failed
            finally:
                await desk.close()

    asyncio.run(run())
    return 0


async def _open(client: aio.AsyncClient, path: str) -> AsyncGroup:
    try:
        return await client.group(path, escape=True)
    except NotFound:
        return await client.group(path, escape=True, create=True, ctl=SETTINGS)


def _answered(tool: Callable[P, Awaitable[T]], error_class: type[Exception]) -> Callable[P, Awaitable[T]]:
    """Return the tool with the reason of each failure as its answer."""

    @wraps(tool)
    async def call(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return await tool(*args, **kwargs)
        except MqfsError as error:
            raise error_class(str(error)) from None

    return call


class Desk:
    """The tools of one agent, and its claims."""

    def __init__(self, group: AsyncGroup) -> None:
        self._group = group
        self._handles: dict[str, AsyncClaims] = {}
        # One task at a time may claim by a handle, but clients call tools in parallel: a lock per stream, while in use.
        self._turns: WeakValueDictionary[str, anyio.Lock] = WeakValueDictionary()
        self._opening = anyio.Lock()  # guards opening handles, as OPEN limits them all
        self._claims: dict[str, AsyncClaim] = {}
        self.closing: Awaitable[None] | None = None  # by a signal

    async def close(self) -> None:
        """Release all claims, uncounted."""
        await self._opening.acquire()  # for good: a wait whose handle is closed opens another one
        async with AsyncExitStack() as stack:
            for handle in self._handles.values():
                stack.push_async_callback(handle.close)

    # ------------------------------------------------------------ work

    async def send(
        self, stream: str, body: str, headers: dict[str, str] | None = None, delay_s: float = 0, id: str = ""
    ) -> dict[str, Any]:
        """Send a message to a stream, which is made where it is missing. `delay_s`: seconds until it is delivered."""
        if (size := len(body.encode(errors="surrogatepass"))) > SENT_BYTES:
            raise TooLong(f"body of {size} bytes (expected at most {SENT_BYTES}, or the name of a file)")
        receipt = await self._group.publish(_named(stream), body, headers=headers or None, delay=delay_s or None, id=id)
        return {"stream": stream, "sequence": receipt.sequence or None}  # null: discarded, as the stream is full

    async def wait(self, stream: str, seconds: float = 30) -> dict[str, Any] | None:
        """Wait for the next message of a stream, and claim it. Returns null where none came in that many seconds, at
        most 3600. The stream is made where it is missing."""
        _require("seconds", seconds, 0, MOST_S)
        if len(self._claims) >= CLAIMS:
            raise OverLimit(f"{CLAIMS} claims are open (expected ack, nack or dead of some)")
        try:
            claim = await self._next(_named(stream), time.monotonic() + seconds)
        except TimeoutError:
            return None
        name = f"{stream}:{claim.sequence}"
        self._claims[name] = claim
        answer = {"claim": name, "deliveries": claim.deliveries, **_shown(claim.message)}
        if "bytes" in answer:
            answer["next"] = _text(claim.body, 0, BODY_BYTES)[1]
        return answer

    async def read(self, claim: str, start: int) -> dict[str, Any]:
        """Read on in the body of a claimed message that is longer than `wait` shows: from its `next` on. The answer has
        the `next` of another call; null: that was the end."""
        body = self._claim(claim).body
        _require("start", start, 0, len(body))
        text, end = _text(body, start, BODY_BYTES)
        return {"body": text, "next": end if end < len(body) else None}

    async def ack(self, claim: str) -> str:
        """Acknowledge a claimed message: its work is done, and it is not delivered again."""
        await self._settle(claim, AsyncClaim.ack)
        return "acknowledged"

    async def nack(self, claim: str, delay_s: float = 0) -> str:
        """Requeue a claimed message whose work failed; after a number of failures it is a dead letter."""
        await self._settle(claim, lambda held: held.nack(delay_s or None))
        return "requeued"

    async def dead(self, claim: str, reason: str) -> str:
        """Give up a claimed message: it goes to the stream of dead letters, with the reason."""
        await self._settle(claim, lambda held: held.dead(reason))
        return "dead letter"

    async def _settle(self, name: str, how: Callable[[AsyncClaim], Awaitable[None]]) -> None:
        """Settle a claim. It is kept after an error, unless the error says that it is lost."""
        try:
            await how(self._claim(name))
        except (Stale, Disconnected):
            self._claims.pop(name, None)
            raise
        self._claims.pop(name, None)

    def _claim(self, name: str) -> AsyncClaim:
        if name not in self._claims:
            raise BadRequest(f"unknown claim {name!r} (expected one that `wait` returned, and that is not settled)")
        return self._claims[name]

    async def _next(self, stream: str, deadline: float) -> AsyncClaim:
        """Claim the next message. If the consumer was removed, make it again. Raises TimeoutError."""
        turn = self._turns.setdefault(stream, anyio.Lock())
        try:
            turn.acquire_nowait()
        except anyio.WouldBlock:
            with anyio.fail_after(deadline - time.monotonic()):
                await turn.acquire()
        try:
            while True:
                handle = await self._handle(stream)
                try:
                    return await handle.get(max(deadline - time.monotonic(), 0.0))
                except EOFError:
                    del self._handles[stream]
                    await handle.close()
        finally:
            turn.release()

    async def _handle(self, stream: str) -> AsyncClaims:
        """Return the handle on a stream. The caller holds the stream's lock."""
        async with self._opening:
            handle = self._handles.get(stream)
            if handle is None:
                if len(self._handles) >= OPEN:
                    raise OverLimit(f"{OPEN} streams are waited on (expected one of {', '.join(self._handles)})")
                await self._group.create(stream)
                handle = self._handles[stream] = await self._group.consume(stream_name(stream), over=stream)
            return handle

    # ------------------------------------------------------------ looks

    async def list(self) -> Rows:
        """List the streams, and how many messages each has to be claimed."""
        stats, names = await self._group.stats(), await self._group.streams()
        rows = [(name, stats.streams.get(stream_name(name)), stats.consumers.get(stream_name(name))) for name in names]
        return [
            {"stream": name, "messages": row.messages, "waiting": consumer.waiting if consumer is not None else None}
            for name, row, consumer in rows
            if row is not None
        ]

    async def tail(self, stream: str, count: int = 10) -> Rows:
        """Show the last messages of a stream that are kept, claimed or not, at most 100. Fewer have longer bodies."""
        _require("count", count, 1, MESSAGES)
        found = [_shown(m, BODY_BYTES // count) async for m in self._group.history(-count, pattern=stream)]
        if not found and stream not in await self._group.streams():
            raise NotFound(f"stream {stream!r} (expected one that `list` shows)")
        return found

    async def history(self, pattern: str = "#", after: int = 0, count: int = 100) -> Rows:
        """Show at most 100 kept messages of streams that match a pattern (`*` a word, `#` any), above a sequence."""
        _require("count", count, 1, MESSAGES)
        _require("after", after, 0, NEVER)
        found = list[dict[str, Any]]()
        async for message in self._group.history(first=after + 1, pattern=pattern):
            found.append(_shown(message, BODY_BYTES // count))
            if len(found) >= count:
                break
        return found

    async def tail_of(self, stream: str) -> Rows:
        """The last messages of a stream."""
        return await self.tail(stream)


def _named(stream: str) -> str:
    if not stream:
        raise BadName("stream '': no name (expected one of a byte or more)")
    return stream


def _require(what: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise BadRequest(f"{what} {value} (expected {least} to {most})")


def _shown(message: Message, most: int = BODY_BYTES) -> dict[str, Any]:
    """Return a message for an answer. `most`: bytes of its body; for a longer body `bytes` is its size."""
    body = bytes(message.body)
    return {
        "stream": message.topic,
        "sequence": message.sequence,
        "time_ns": message.time_ns,
        "headers": dict(message.headers),
        "body": _text(body, 0, most)[0],
        **({"bytes": len(body)} if len(body) > most else {}),
    }


def _text(body: bytes, start: int, most: int) -> tuple[str, int]:
    """Return text of the body from `start`, within `most` bytes, and where it ends: no character is cut."""
    decoder, end = codecs.getincrementaldecoder("utf-8")("replace"), min(start + most, len(body))
    text = decoder.decode(body[start:end], final=end == len(body))
    return text, end - len(decoder.getstate()[0])
