"""Open `ctl` files."""

from __future__ import annotations

from typing import Any

from mqfs import errors
from mqfs.engine.control.actions import MESSAGE_ACTIONS, ValidatedChange, add, check_settings, write_messages
from mqfs.engine.control.changes import Changes
from mqfs.engine.files import status_files
from mqfs.engine.files.command_file import PrintedCommands
from mqfs.engine.language.settings import Action, Settings, parse
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
            text = self.lines_of(data)
            return self._perform(text, len(data)) if text else len(data)
        except errors.MqfsError as error:
            self.refused(error)
            raise

    def _perform(self, text: str, value: int) -> Step[int]:
        steps = parse(text, self.group.settings)
        check_settings(self.group, steps)
        plan = ValidatedChange(self.group)
        words = self.group.settings.words
        for settings, action in steps:
            if settings.words != words:
                plan.check_words()
                words = settings.words
            if action is not None:
                plan.check(settings, action)
        self._end_ring(steps)
        changes = Changes(self.group, self.user)
        for settings, action in steps:
            changes.set(settings)
            if action is not None and action.verb in MESSAGE_ACTIONS:  # no change: messages are written
                changes.commit()
                write_messages(self.group, action)
                changes = Changes(self.group, self.user)
            elif action is not None:
                add(changes, self.group, action)
        changes.commit()
        for line in map(str.strip, text.split("\n")):
            if line and not line.startswith("#"):
                self.audit("ctl", line)
        self.group.unblock()
        return self.group.log.after_metadata_sync(value)

    def _end_ring(self, steps: list[tuple[Settings, Action | None]]) -> None:
        """Where new settings end the ring, take its messages before anything is planned."""
        group = self.group
        if group.ring is not None and steps and steps[-1][0] != group.settings:
            group.ring.changed([{"do": "ctl", "lines": steps[-1][0].lines(given=True)}])
