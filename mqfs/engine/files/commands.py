"""Files that take commands, line by line: a write is all or nothing, and a refusal is the next read."""

from __future__ import annotations

import contextlib

from mqfs import errors, limits
from mqfs.engine.core.portions import Work
from mqfs.engine.files.handle import OpenFile
from mqfs.errors import shortened
from mqfs.model import Step, Wait
from mqfs.net.audit import REFUSALS


class CommandFile(OpenFile):
    """A file whose writes are command lines and whose refusals can be read."""

    refusal: bytes | None = None  # why the last write was refused
    pending: bytes | None = None  # the text that a command asked for, `info` say
    unexpected: Exception | None = None  # what the next read raises: a bug

    def lines_of(self, data: bytes) -> str:
        """The whole lines there are now; an unfinished one waits. Raises TooLong, BadCommand."""
        text = self.partial + data
        if len(text) > limits.CTL_BYTES:
            raise errors.TooLong(f"commands of {len(text)} bytes (expected at most {limits.CTL_BYTES} in a write)")
        whole, newline, rest = text.rpartition(b"\n")
        if len(data) < self.whole_below:
            whole, newline, rest = text, b"", b""
        if rest or self.partial:
            self.keep(rest)
        try:
            return (whole + newline).decode()
        except UnicodeDecodeError:
            raise errors.BadCommand("invalid commands: not UTF-8") from None

    def refused(self, error: errors.MqfsError, rest: bytes | None = None) -> None:
        """A write was refused, and with it the unfinished line: `rest`, unless later writes changed it; None: any."""
        if self.partial and (rest is None or self.partial is rest):
            self.keep(b"")
        self.refusal = f"{shortened(str(error))}\n".encode()
        super().refused(error)
        if isinstance(error, REFUSALS):
            self.audit("write", error.detail, status="refused")

    def flush(self) -> Step[int]:
        return self.write(b"\n") if self.partial else 0

    def close(self) -> None:
        if not self.closed:
            with contextlib.suppress(errors.MqfsError):  # it is in `.errors`
                self.flush()
        super().close()

    def take_response(self, count: int) -> bytes | None:
        """What the next read returns first, once: why a write was refused, then what a command asked for."""
        text = None
        if self.unexpected is not None:
            error, self.unexpected = self.unexpected, None
            raise error
        if self.refusal is not None:
            text, self.refusal = self.refusal[:count], self.refusal[count:] or None
        elif self.pending is not None:
            text, self.pending = self.pending[:count], self.pending[count:] or None
        return text


class LongResponses(CommandFile):
    """One whose commands ask for texts that may take long: these are made in portions, and a read waits for one."""

    making: Wait[bytes] | None = None
    _reading: tuple[Wait[bytes], int] | None = None  # the read that waits, and its size

    def respond(self, work: Work[bytes]) -> None:
        """The next read returns what that work gives."""
        self.stop_making()
        step = self.group.portions.run(work)
        if isinstance(step, Wait):
            self.making = step
            step.subscribe(self._made)
        else:
            self.pending = step

    def _made(self, making: Wait[bytes]) -> None:
        self.making, read, self._reading = None, self._reading, None
        try:
            self.pending = making.result()
        except errors.MqfsError as error:
            self.refused(error)
            self.refusal = f"{error.wire_text()}\n".encode()  # in place of the answer: a program has no errno
        except Exception as error:  # else its read would wait for ever
            self.unexpected = error
        if read is not None:
            try:
                answer = self.take_response(read[1]) or b""
            except Exception as error:
                read[0].fail(error)
            else:
                read[0].resolve(answer)
        self.group.fanout.pollers.wake()

    def await_response(self, count: int) -> Wait[bytes]:
        """What a read gets while one is made. Raises Busy for a second read."""
        if self._reading is not None:
            raise errors.Busy(f"{self.node.name}: another read waits for an answer")
        wait: Wait[bytes] = Wait(self._cancel)
        self._reading = wait, count
        return wait

    def _cancel(self, _: Wait[bytes]) -> bool:
        self._reading = None
        return True

    def stop_making(self) -> None:
        """It is not wanted any more."""
        making, read = self.making, self._reading
        self.making = self._reading = None
        if making is not None:
            making.cancel()
        if read is not None:
            read[0].fail(errors.Interrupted(f"{self.node.name}: the answer was cut off"))


class PrintedCommands(CommandFile):
    """A file of commands that prints, read from its beginning, how things stand."""

    text: bytes | None = None

    def print(self) -> str:
        raise NotImplementedError

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        self.require(reading=True)
        told = self.take_response(count)
        if told is not None:
            return told
        if self.text is None or offset == 0:
            self.text = self.print().encode()
        return self.text[offset : offset + count]
