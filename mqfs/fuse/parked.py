"""Requests of a mount that wait for the engine, and their interrupts."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Any

from mqfs import errors, limits
from mqfs.fuse import protocol
from mqfs.fuse.device import Device
from mqfs.shares import Shares
from mqfs.wait import Wait


class ParkedRequest:
    """A request without a reply yet. Called by the engine with the result of its wait."""

    __slots__ = ("requests", "step", "then", "uid", "unique")

    def __init__(
        self, requests: ParkedRequests, unique: int, step: Wait[Any], then: Callable[[Any], object], uid: int | None
    ) -> None:
        self.requests, self.unique, self.step, self.then = requests, unique, step, then
        self.uid = uid  # whose share it counts against; None: it is over the limit

    def __call__(self, step: Wait[Any]) -> None:
        device = self.requests.device
        self.requests.remove(self)
        try:
            self.then(step.result())
        except errors.MqfsError as error:
            device.refuse(self.unique, error.errno)
        except Exception:
            device.bug(self.unique, "parked request")


class ParkedRequests:
    """The parked requests of one mount, each against its user's share of `waits`."""

    def __init__(self, device: Device, waits: Shares) -> None:
        self.device, self._waits = device, waits
        self.by_unique: dict[int, ParkedRequest] = {}
        self.early: dict[int, None] = {}  # requests that were interrupted before they came, the oldest first
        self.closing = False

    def park(self, unique: int, step: Wait[Any], then: Callable[[Any], object]) -> None:
        """Have `then` reply with the result of a step. Raises OverLimit where one over the limit can be cancelled."""
        uid: int | None = protocol.U32.unpack_from(self.device.buffer, protocol.USER)[0]
        try:
            self._waits.take(uid)
        except errors.OverLimit:
            if step.cancel():
                raise
            uid = None
        request = self.by_unique[unique] = ParkedRequest(self, unique, step, then, uid)
        step.subscribe(request)

    def remove(self, request: ParkedRequest) -> None:
        if self.by_unique.pop(request.unique, None) is not None and request.uid is not None:
            self._waits.give(request.uid)

    def interrupt(self, unique: int) -> None:
        """Cancel a request, or remember to. One that can no longer be cancelled is answered as if it was not asked."""
        request = self.by_unique.get(unique)
        if request is not None:
            self._cancel(request)
        elif not self.closing:
            self.early[unique] = None
            if len(self.early) > limits.INTERRUPTS:
                del self.early[next(iter(self.early))]

    def _cancel(self, request: ParkedRequest) -> None:
        if request.step.cancel():
            self.remove(request)
            self.device.refuse(request.unique, errno.EINTR)

    def is_interrupted(self, unique: int) -> bool:
        """Whether a request was interrupted before it came; then it is answered."""
        if unique not in self.early:
            return False
        del self.early[unique]
        self.device.refuse(unique, errno.EINTR)
        return True

    def close(self) -> None:
        """Cancel all, and from now on answer every read with end of file."""
        self.closing = True
        self.early[0] = None  # no request has that number: from now on every read and write looks here
        for request in reversed(list(self.by_unique.values())):  # so that none becomes the first of its queue
            self._cancel(request)
