"""Open `ctl` files."""

from __future__ import annotations

from typing import Any

from mqfs import errors
from mqfs.engine.control.actions import (
    MESSAGE_ACTIONS,
    ValidatedChange,
    add,
    check_settings,
    losses_now,
    parts_of,
    write_messages,
)
from mqfs.engine.control.changes import Changes
from mqfs.engine.control.losses import Losses, Steps
from mqfs.engine.files import status_files
from mqfs.engine.files.command_file import PrintedCommands
from mqfs.engine.language.settings import parse
from mqfs.engine.log.portions import Work, exhaust
from mqfs.model import User
from mqfs.wait import Step


class CtlHandle(PrintedCommands):
    """`ctl`: settings and actions of a group. Open for reading only it has a `size`, for programs that trust one."""

    size: int | None = None

    def __init__(self, node: Any, user: User, reads: bool, writes: bool) -> None:
        super().__init__(node, user, reads, writes)
        if reads and not writes:
            self.text = self.print().encode()
            self.size = len(self.text)

    def on_opened(self) -> None:
        self.hold(self.size or 0)
        super().on_opened()

    def print(self) -> str:
        return status_files.ctl(self.group, self.user)

    def write(self, data: bytes, offset: int = 0) -> Step[int]:
        self.require(reading=False)
        try:
            if not (text := self.lines_of(data)):
                return len(data)
            self.group.commands.admit(self.user.uid, len(text))
        except errors.MqfsError as error:
            self.refused(error)
            raise
        return self.group.commands.run(lambda: self._work(text, len(data)), self.user.uid, len(text))

    def _work(self, text: str, value: int) -> Work[Step[int]]:
        try:
            return (yield from self._carry_out(text, value))
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _carry_out(self, text: str, value: int) -> Work[Step[int]]:
        group = self.group
        parts, losses = yield from self._plan(text)
        for part in parts:
            changes = Changes(group, self.user, losses if losses is not None else losses_now(group, part))
            for settings, action in part:
                changes.set(settings)
                if action is not None:
                    add(changes, group, action)
            if losses is not None:
                yield from changes.commit()
            else:
                exhaust(changes.commit())
            if part and (last := part[-1][1]) is not None and last.verb in MESSAGE_ACTIONS:
                write_messages(group, last)
        for line in map(str.strip, text.split("\n")):
            if line and not line.startswith("#"):
                self.audit("ctl", line)
        group.unblock()
        return group.log.after_metadata_sync(value)

    def _plan(self, text: str) -> Work[tuple[list[Steps], Losses | None]]:
        """The lines, each part of which ends with one that writes messages, but for the last; and what a write that is
        a single part takes from streams. Raises what would stop one of them."""
        group = self.group
        steps = parse(text, group.settings)
        self._check(steps)
        self._end_ring(steps)
        parts = parts_of(steps)
        if len(parts) > 1:
            return parts, None
        losses, count = Losses(group, steps), group.portions.count
        yield from losses.find()
        if group.portions.count != count:
            self._check(steps)
            self._end_ring(steps)
        return parts, losses

    def _check(self, steps: Steps) -> None:
        """Raises what would stop one of them."""
        check_settings(self.group, steps)
        plan = ValidatedChange(self.group)
        words = self.group.settings.words
        for settings, action in steps:
            if settings.words != words:
                plan.check_words()
                words = settings.words
            if action is not None:
                plan.check(settings, action)

    def _end_ring(self, steps: Steps) -> None:
        """Where new settings end the ring, take its messages before anything is planned."""
        group = self.group
        if group.ring is not None and steps and steps[-1][0] != group.settings:
            group.ring.changed([{"do": "ctl", "lines": steps[-1][0].lines(given=True)}])
