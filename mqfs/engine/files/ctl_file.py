"""Open `ctl` files."""

from __future__ import annotations

from mqfs import errors
from mqfs.engine.control.actions import (
    MESSAGE_ACTIONS,
    PASSING,
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
from mqfs.engine.files.command_file import CommandFile
from mqfs.engine.language.settings import read
from mqfs.engine.log.portions import Work, exhaust
from mqfs.wait import Step

_STEPS = 32  # lines between two looks at the clock: some 50 us


class CtlHandle(CommandFile):
    """`ctl`, open for writing: settings and actions of a group. For reading only it is a TextHandle."""

    text = b""  # that is read

    def read(self, count: int, offset: int = 0) -> Step[bytes]:
        """From its beginning, how things stand then."""
        self.require(reading=True)
        told = self.take_response(count)
        if told is not None:
            return told
        if offset:
            return self.text[offset : offset + count]
        return self.group.portions.run(self._print(count), may_be_cancelled=False)

    def _print(self, count: int) -> Work[bytes]:
        self.text = (yield from status_files.ctl(self.group, self.user)).encode()
        return self.text[:count]

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
        for count, line in enumerate(map(str.strip, text.split("\n")), 1):
            if line and not line.startswith("#"):
                self.audit("ctl", line)
            if count % _STEPS == 0:
                yield
        group.unblock()
        return group.log.after_metadata_sync(value)

    def _plan(self, text: str) -> Work[tuple[list[Steps], Losses | None]]:
        """The lines, each part of which ends with one that writes messages, but for the last; and what a write that is
        a single part takes from streams. Raises what would stop one of them."""
        group = self.group
        steps = []
        for count, step in enumerate(read(text, group.settings), 1):
            steps.append(step)
            if count % _STEPS == 0:
                yield
        portions, changes = group.portions.count, group.log.changes
        yield from self._check(steps)
        self._end_ring(steps)
        parts = parts_of(steps)
        losses = Losses(group, steps) if len(parts) == 1 else None
        if losses is not None:
            yield from losses.find()
        if group.portions.count != portions:
            self._check_again(steps, changes)
        return parts, losses

    def _check(self, steps: Steps) -> Work[None]:
        """Raises what would stop one of them."""
        check_settings(self.group, steps)
        plan = ValidatedChange(self.group)
        words = self.group.settings.words
        for count, (settings, action) in enumerate(steps, 1):
            if settings.words != words:
                plan.check_words()
                words = settings.words
            if action is not None:
                plan.check(settings, action)
            if count % _STEPS == 0:
                yield

    def _check_again(self, steps: Steps, changes: int) -> None:
        """Others were served since that many changes of the group: nothing else matters to most lines."""
        verbs = {action.verb for _, action in steps if action is not None}
        if self.group.log.changes != changes or not verbs.isdisjoint(PASSING):
            exhaust(self._check(steps))
        else:
            check_settings(self.group, steps)
        self._end_ring(steps)

    def _end_ring(self, steps: Steps) -> None:
        """Where new settings end the ring, take its messages before anything is planned."""
        group = self.group
        if group.ring is not None and steps and steps[-1][0] != group.settings:
            group.ring.changed([{"do": "ctl", "lines": steps[-1][0].lines(given=True)}])
