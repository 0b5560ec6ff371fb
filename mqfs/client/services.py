"""The part of a group for services: requests with replies, and schedules.

A request is a message whose header `reply-to` names a stream that its sender reads:

    requester   makes reply.UUID, a temporary stream, and publishes {reply-to reply.UUID} to the stream of the service
    replier     receives that as any message, and publishes to reply.UUID
    requester   reads the reply, and closes its file: the stream is gone

A temporary stream goes with its last open file, so also with the connection or the process of the requester. A reply
that comes later is refused as NotFound, and has no `reply-to` itself: nothing can go round for ever.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from datetime import datetime

from mqfs import limits
from mqfs.client.administration import Administration
from mqfs.client.message import Message, Receipt
from mqfs.client.outgoing import Outgoing, addressed
from mqfs.client.subscription import CursorSubscription
from mqfs.client.types import Body, Duration
from mqfs.errors import BadCommand, BadRequest, NotFound
from mqfs.records.headers import REPLY_TO
from mqfs.syntax.quoting import quote_word


class Services(Administration):
    """The part of a `Group` with requests, replies and schedules."""

    def request(
        self, stream: str, body: Body, timeout: float = 10.0, *, headers: Mapping[str, str] | None = None
    ) -> Message:
        """Publish a message, and wait for one reply. It is not delivered any more when the time is over.

        Args:
            stream: The stream of the service, which must exist.
            body: See `publish`.
            timeout: The most seconds to wait, up to a day.
            headers: Texts by name. None: none.

        Returns:
            The reply.

        Raises:
            TimeoutError: There was none in that time. The request may have been carried out.
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
            if receipt.retained is False and not receipt.duplicate:  # a repeat may find it answered already
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
            request: The message, of a claim its `message`.
            body: See `publish`.
            headers: Texts by name. None: none.

        Returns:
            See `publish`.

        Raises:
            BadRequest: The message is no request: it has no header `reply-to`.
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
        """Publish a message again and again. It survives restarts; runs that were missed meanwhile are one.

        Each run has the `id` NAME@TIME. The very same schedule again changes nothing, another one takes its place.

        Args:
            name: The schedule's name in the group.
            stream: See `publish`.
            body: See `publish`; at most the size of one message.
            every: How long between two runs, 1 s or more: seconds, "1h" or a timedelta. None: see `cron`.
            cron: Five fields as of crontab, and perhaps a zone, such as "0 5 * * 1-5 Europe/Berlin"; else UTC. Empty:
                see `every`.
            at: When `every` runs first: UNIX seconds or a datetime. None: after one period.
            ttl: How long each message lives: see `publish`. None: as the group has it.
            priority: See `publish`. None: 5.
            headers: See `publish`. None: none.
            single: See `publish`.
            create: Whether a missing stream is made.

        Returns:
            Its `time_ns` is that of the next run; `duplicate`: there was the same already.

        Raises:
            BadCommand: Both `every` and `cron` or none, or one is invalid.
            NotPermitted: A schedule of that name is another user's.
            OverLimit: The group has too many.
        """
        if (every is None) == (not cron):
            raise BadCommand("schedule failed: every and cron (expected one of them)")
        stream = self._name(stream)
        message = Outgoing(
            stream, body, ttl, at=at, priority=priority, headers=headers, id=name, single=single, every=every, cron=cron
        )
        return self._publisher.publish(message, create)

    def unschedule(self, name: str) -> None:
        """Remove a schedule. `Group.stats` has them all.

        Args:
            name: Its name.

        Raises:
            NotFound: It is missing.
            Denied: The user may not write ctl.
        """
        self.ctl(f"unschedule {quote_word(name)}")
