"""Writers that wait for room (`full block`): each stream's in their order."""

from __future__ import annotations

from collections.abc import Callable

from mqfs import errors
from mqfs.engine.publishing.admission import Admission, Stream, WriteRequest
from mqfs.wait import Step, Wait


class BlockedWriters:
    """Of one group; each stream's are in `stream.blocked`. `admit` and `append` are the publisher's."""

    def __init__(
        self,
        admit: Callable[[Stream, WriteRequest], Admission],
        append: Callable[[Stream, WriteRequest], Step[int]],
    ) -> None:
        self._admit, self._append = admit, append
        self.streams: set[Stream] = set()  # on which writers wait

    def park(self, stream: Stream, request: WriteRequest) -> Wait[int]:
        """It waits for room there. Where it is cancelled before there was, nothing of it was appended."""

        def cancel(wait: Wait[int]) -> bool:
            place = _place(stream, request)
            first = place is not None and next(iter(place.blocked), None) is wait
            if place is None or place.blocked.pop(wait, None) is None:
                return False
            if request.undo is not None:
                request.undo()
            if first:
                self.settle()  # it stood before others for whom there may be room
            return True

        wait: Wait[int] = Wait(cancel)
        stream.blocked[wait] = request
        self.streams.add(stream)
        return wait

    def settle(self) -> None:
        """Something may have made room: append what is admitted by now."""
        if not self.streams:
            return
        for stream in sorted(self.streams, key=lambda stream: stream.number):
            self._settle(stream)
            if not stream.blocked:
                self.streams.discard(stream)

    def _settle(self, stream: Stream) -> None:
        blocked = stream.blocked
        while blocked:
            wait, request = next(iter(blocked.items()))
            del blocked[wait]
            rest, stream.blocked = blocked, {}  # so that this one does not have to stand behind the others
            try:
                step = self._try(stream, request)
            except Exception as error:
                stream.blocked = blocked = rest
                _refuse(wait, request, error)
                continue
            if step is None:
                place = _place(stream, request)
                if place is None or place is stream:
                    stream.blocked = {wait: request, **rest}
                    return
                stream.blocked = blocked = rest  # there is room here: it waits where there is none
                place.blocked[wait] = request
                self.streams.add(place)
                continue
            stream.blocked = blocked = rest
            wait.follow(step)
        stream.pollers.wake()

    def _try(self, stream: Stream, request: WriteRequest) -> Step[int] | None:
        """None: there is no room yet."""
        admission = self._admit(stream, request)
        if admission is Admission.WAIT:
            return None
        return request.total if admission is Admission.DISCARD else self._append(stream, request)


def refuse_all(stream: Stream, error: errors.MqfsError) -> None:
    """Of a stream that is removed, or whose server stops."""
    for wait in list(stream.blocked):
        _refuse(wait, stream.blocked.pop(wait), error)


def _place(stream: Stream, request: WriteRequest) -> Stream | None:
    """The stream on which a request waits: a batch waits where it lacks room."""
    return stream if request.unit is None else request.unit.lacking


def _refuse(wait: Wait[int], request: WriteRequest, error: Exception) -> None:
    if request.undo is not None:
        request.undo()
    wait.fail(error)
