"""The administration of a group (its lists, counters and settings, its views, streams and consumers), and its services:
requests with replies, and schedules.

A request is a message whose header `reply-to` names a stream that its sender reads:

    requester   makes reply.UUID, a temporary stream, and publishes {reply-to reply.UUID} to the stream of the service
    replier     receives that as any message, and publishes to reply.UUID
    requester   reads the reply, and closes its file, which removes the stream

A temporary stream is removed with its last open file, so also with the connection or the process of the requester. A
later reply is refused as NotFound. A reply has no `reply-to` itself, so replies cannot loop.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping
from datetime import datetime

from mqfs import limits
from mqfs.client.info import Settings, Stats
from mqfs.client.message import Message, Receipt, topic_of
from mqfs.client.publisher import Outgoing, Publisher, addressed
from mqfs.client.subscription import CursorSubscription
from mqfs.client.types import Body, Duration, Link, read_whole, write_lines
from mqfs.errors import BadCommand, BadRequest, NotFound
from mqfs.records.headers import REPLY_TO
from mqfs.syntax.lines import quote_word, split
from mqfs.syntax.names import check_file_name, stream_name


class Administration:
    """The calls of a `Group` that handle no messages.

    Attributes:
        path: The group's path from the root, such as "shop"; empty: the root.
    """

    path: str
    _link: Link
    _publisher: Publisher
    _escapes: bool

    def _name(self, stream: str) -> str:
        return stream_name(stream) if self._escapes else stream

    # ------------------------------------------------------------ queries

    def streams(self) -> list[str]:
        """List the streams.

        Returns:
            Their names; with `escape=True`, the texts that were escaped to these names.

        Raises:
            NotFound: The group is missing.
            Denied: The user has no r on it.
        """
        names = self._link.names(f"{self.path}/.kept")
        return [*map(topic_of, names)] if self._escapes else names

    def groups(self) -> list[str]:
        """List the groups inside.

        Returns:
            Their names.

        Raises:
            NotFound: The group is missing.
            Denied: The user has no r on it.
        """
        views = {split(row)[1] for row in self._ctl_lines() if row.startswith("bind ")}
        others = {*self._link.names(f"{self.path}/.kept"), *views, "ctl", "order"}
        return [n for n in self._link.names(self.path) if n not in others and not n.startswith(".")]

    def consumers(self) -> list[str]:
        """List the consumers.

        Returns:
            Their names.

        Raises:
            NotFound: The group is missing.
            Denied: The user has no r on it.
        """
        return self._link.names(f"{self.path}/.consumers")

    def stats(self) -> Stats:
        """Read the counters, `.stats`.

        Returns:
            The counters of the group, its streams and its consumers.

        Raises:
            NotFound: The group is missing.
            Denied: The user has no r on it.
        """
        return Stats.parse(json.loads(read_whole(self._link, f"{self.path}/.stats")))

    def settings(self) -> Settings:
        """Read the settings of ctl.

        Returns:
            All settings, defaults included; durations in seconds.

        Raises:
            NotFound: The group is missing.
            Denied: The user has no r on it.
        """
        return Settings.parse(self._ctl_lines())

    def _ctl_lines(self) -> list[str]:
        return read_whole(self._link, f"{self.path}/ctl").decode().rstrip("\n").split("\n")

    # ------------------------------------------------------------ configuration

    def ctl(self, *lines: str | Settings) -> None:
        """Change settings, or perform other commands of ctl.

        Args:
            *lines: Lines as in mqfs(4), "ctl", or `mqfs.Settings`. All take effect, or none.

        Raises:
            BadCommand: A line is invalid.
            Denied: The user may not write ctl.
            Busy: The setting cannot be changed now.
        """
        self._publisher.close_idle()
        texts = [text for line in lines for text in ([line] if isinstance(line, str) else line.lines())]
        write_lines(self._link, f"{self.path}/ctl", *texts)

    def bind(self, view: str, *patterns: str) -> None:
        """Bind a view to patterns; an existing view gets these patterns, too.

        Args:
            view: The view's name.
            *patterns: Patterns or routing programs.

        Raises:
            BadRequest: No pattern.
            BadCommand: A pattern is invalid.
        """
        if not patterns:
            raise BadRequest(f"bind failed: no pattern of {view!r} (expected one or more)")
        self.ctl(*(f"bind {quote_word(view)} {quote_word(pattern)}" for pattern in patterns))

    def unbind(self, view: str, pattern: str = "") -> None:
        """Remove a view, or one of its patterns.

        Args:
            view: The view's name.
            pattern: The pattern or routing program. Empty: the whole view.

        Raises:
            NotFound: The view or the pattern is missing.
        """
        self.ctl(f"unbind {quote_word(view)} {quote_word(pattern)}" if pattern else f"unbind {quote_word(view)}")

    def redrive(self, stream: str = "", count: int | None = None) -> None:
        """Republish dead letters to their streams, oldest first.

        Args:
            stream: Only dead letters that came from this stream. Empty: all.
            count: The most dead letters. None: all.

        Raises:
            BadRequest: A count without a stream.
        """
        if count is not None and not stream:
            raise BadRequest("redrive failed: count without stream (expected both)")
        words = [quote_word(self._name(stream))] if stream else []
        self.ctl(" ".join(["redrive", *words, *([] if count is None else [str(count)])]))

    def purge(self, stream: str = "") -> None:
        """Drop the retained messages, except delayed ones.

        Args:
            stream: The stream. Empty: all streams.

        Raises:
            NotFound: The stream is missing.
        """
        self.ctl(f"clear {quote_word(self._name(stream))}" if stream else "clear")

    def create(self, *streams: str) -> None:
        """Make streams, unless they exist.

        Args:
            *streams: The names of the streams.

        Raises:
            BadName: A name is not one of a stream.
        """
        for stream in streams:
            self._publisher.make(self._name(stream))

    def remove(self, stream: str) -> None:
        """Remove a stream with its messages, or a view.

        Args:
            stream: The name of the stream or view.

        Raises:
            NotFound: It is missing.
            NotPermitted: The group has `protect on`.
        """
        self._publisher.close_idle()
        self._link.remove(f"{self.path}/{check_file_name(self._name(stream))}")

    def remove_consumer(self, consumer: str) -> None:
        """Remove a consumer.

        Args:
            consumer: The consumer's name.

        Raises:
            NotFound: The consumer is missing.
            Busy: It holds a claim.
        """
        self._link.remove(f"{self.path}/.consumers/{check_file_name(consumer)}")


class Services(Administration):
    """The calls of a `Group` for requests, replies and schedules."""

    def request(
        self, stream: str, body: Body, timeout: float = 10.0, *, headers: Mapping[str, str] | None = None
    ) -> Message:
        """Publish a message, and wait for one reply. After the timeout the message is not delivered any more.

        Args:
            stream: The stream of the service, which must exist.
            body: See `publish`.
            timeout: The most seconds to wait, up to a day.
            headers: Texts by name. None: none.

        Returns:
            The reply.

        Raises:
            TimeoutError: No reply came in time. The request may have been carried out.
            NotFound: The stream is missing, or has no reader: the group has `replay off`, and no consumer.
            BadRequest: The timeout is out of range.
            Denied: The user has no w on the stream, or none on the group.
            Disconnected: The outcome is unknown.
        """
        if not 0 < timeout <= limits.REQUEST_S:
            raise BadRequest(
                f"request failed: timeout {timeout} (expected more than 0, at most {limits.REQUEST_S:.0f} s)"
            )
        ends = time.monotonic() + timeout
        if self._escapes:
            stream, headers = addressed(stream, headers)
        name = f"reply.{secrets.token_hex(12)}"
        file = self._link.create_temporary(f"{self.path}/{name}")
        try:
            message = Outgoing(stream, body, timeout, headers={**(headers or {}), REPLY_TO: name})
            receipt = self._publisher.publish(message, False, max(ends - time.monotonic(), 0.0))
            if receipt.retained is False and not receipt.duplicate:  # a repeated request may be answered already
                raise NotFound(f"request failed: no consumer and no reader of stream {stream!r}")
            with CursorSubscription(self._link, self.path, [name], start="first", reconnect=False) as replies:
                return replies.get(max(ends - time.monotonic(), 0))
        except TimeoutError:
            raise TimeoutError(f"request failed: no reply from stream {stream!r} in {timeout:g} s") from None
        finally:
            file.close()

    def reply(self, request: Message, body: Body, *, headers: Mapping[str, str] | None = None) -> Receipt:
        """Publish the reply to a request, before it is acknowledged.

        Args:
            request: The message; for a claim, its `message`.
            body: See `publish`.
            headers: Texts by name. None: none.

        Returns:
            See `publish`.

        Raises:
            BadRequest: The message is not a request: it has no header `reply-to`.
            NotFound: The requester does not wait any more.
            Denied: The user has no w on the stream of replies.
        """
        name = request.headers.get(REPLY_TO)
        if not name:
            raise BadRequest(
                f"reply failed: message {request.sequence} has no header {REPLY_TO!r} (expected a request)"
            )
        try:
            return self._publisher.publish(Outgoing(name, body, headers=headers), False)
        except NotFound:
            raise NotFound(f"reply failed: no stream {name!r}, the requester does not wait any more") from None

    def schedule(
        self,
        name: str,
        stream: str,
        body: Body,
        *,
        every: Duration | None = None,
        cron: str = "",
        at: float | datetime | None = None,
        ttl: Duration | None = None,
        priority: int | None = None,
        headers: Mapping[str, str] | None = None,
        single: bool = False,
        create: bool = True,
    ) -> Receipt:
        """Publish a message repeatedly. The schedule survives restarts; missed runs are made up by a single one.

        Each run has the `id` NAME@TIME. The very same schedule again changes nothing; another one replaces it.

        Args:
            name: The schedule's name in the group.
            stream: See `publish`.
            body: See `publish`; at most the size of one message.
            every: The time between two runs, 1 s or more: seconds, "1h" or a timedelta. None: see `cron`.
            cron: Five fields as in crontab, and perhaps a zone, such as "0 5 * * 1-5 Europe/Berlin"; else UTC. Empty:
                see `every`.
            at: When `every` runs first: UNIX seconds or a datetime. None: after one period.
            ttl: How long each message lives: see `publish`. None: the group's `ttl`.
            priority: See `publish`. None: 5.
            headers: See `publish`. None: none.
            single: See `publish`.
            create: Whether a missing stream is made.

        Returns:
            The receipt: `time_ns` is the time of the next run; `duplicate`: the same schedule existed.

        Raises:
            BadCommand: Both `every` and `cron` or none, or one is invalid.
            NotPermitted: A schedule of that name is another user's.
            OverLimit: The group has too many schedules.
        """
        if (every is None) == (not cron):
            raise BadCommand("schedule failed: every and cron (expected one of them)")
        stream = self._name(stream)
        message = Outgoing(
            stream, body, ttl, at=at, priority=priority, headers=headers, id=name, single=single, every=every, cron=cron
        )
        return self._publisher.publish(message, create)

    def unschedule(self, name: str) -> None:
        """Remove a schedule. `Group.stats` lists all schedules.

        Args:
            name: The schedule's name.

        Raises:
            NotFound: The schedule is missing.
            Denied: The user may not write ctl.
        """
        self.ctl(f"unschedule {quote_word(name)}")
