"""What a group has, and how it is set up: its lists, counters and settings, its views, streams and consumers."""

from __future__ import annotations

import json

from mqfs.client.info import Settings, Stats
from mqfs.client.message import topic_of
from mqfs.client.publisher import Publisher
from mqfs.client.types import Link, read_whole
from mqfs.errors import BadRequest
from mqfs.syntax.escape import stream_name
from mqfs.syntax.names import check_file_name
from mqfs.syntax.quoting import command_lines, quote_word, split


class Administration:
    """The part of a `Group` that handles no messages.

    Attributes:
        path: Its path from the root, "/shop".
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
            Their names; with `escape=True` the texts.

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
            Those of the group, its streams and its consumers.

        Raises:
            NotFound: The group is missing.
            Denied: The user has no r on it.
        """
        return Stats.parse(json.loads(read_whole(self._link, f"{self.path}/.stats")))

    def settings(self) -> Settings:
        """Read the settings of ctl.

        Returns:
            All of them, defaults included; durations in seconds.

        Raises:
            NotFound: The group is missing.
            Denied: The user has no r on it.
        """
        return Settings.parse(self._ctl_lines())

    def _ctl_lines(self) -> list[str]:
        return read_whole(self._link, f"{self.path}/ctl").decode().rstrip("\n").split("\n")

    # ------------------------------------------------------------ configuration

    def ctl(self, *lines: str | Settings) -> None:
        """Change settings, and do what else ctl does.

        Args:
            *lines: Lines of mqfs(4), "ctl", or `mqfs.Settings`. All take effect, or none.

        Raises:
            BadCommand: A line is invalid.
            Denied: The user may not write ctl.
            Busy: The setting cannot be changed now.
        """
        self._publisher.close_idle()
        texts = [text for line in lines for text in ([line] if isinstance(line, str) else line.lines())]
        file = self._link.open(f"{self.path}/ctl", "w")
        try:
            file.write(command_lines(*texts))
        finally:
            file.close()

    def bind(self, view: str, *patterns: str) -> None:
        """Bind a view to patterns, or to more of them.

        Args:
            view: Its name.
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
            view: Its name.
            pattern: The pattern or routing program. Empty: the whole view.

        Raises:
            NotFound: It is missing.
        """
        self.ctl(f"unbind {quote_word(view)} {quote_word(pattern)}" if pattern else f"unbind {quote_word(view)}")

    def redrive(self, stream: str = "", count: int | None = None) -> None:
        """Republish dead letters to their streams, oldest first.

        Args:
            stream: The stream they came from. Empty: all.
            count: The most of them. None: all.

        Raises:
            BadRequest: A count without a stream.
        """
        if count is not None and not stream:
            raise BadRequest("redrive failed: count without stream (expected both)")
        words = [quote_word(self._name(stream))] if stream else []
        self.ctl(" ".join(["redrive", *words, *([] if count is None else [str(count)])]))

    def purge(self, stream: str = "") -> None:
        """Drop the retained messages.

        Args:
            stream: Of this stream. Empty: of all.

        Raises:
            NotFound: It is missing.
        """
        self.ctl(f"clear {quote_word(self._name(stream))}" if stream else "clear")

    def create(self, *streams: str) -> None:
        """Make streams, unless they exist.

        Args:
            *streams: Their names.

        Raises:
            BadName: A name is not one of a stream.
        """
        for stream in streams:
            self._publisher.make(self._name(stream))

    def remove(self, stream: str) -> None:
        """Remove a stream with its messages, or a view.

        Args:
            stream: Its name.

        Raises:
            NotFound: It is missing.
            NotPermitted: The group has `protect on`.
        """
        self._publisher.close_idle()
        self._link.remove(f"{self.path}/{check_file_name(self._name(stream))}")

    def remove_consumer(self, consumer: str) -> None:
        """Remove a consumer.

        Args:
            consumer: Its name.

        Raises:
            NotFound: It is missing.
            Busy: It holds a claim.
        """
        self._link.remove(f"{self.path}/.consumers/{check_file_name(consumer)}")
