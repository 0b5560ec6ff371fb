"""Every condition the tree can refuse with: one class each, with its errno, its 9P text and its HTTP status.

This is the only such table. The engine raises these where the condition is known; each front end translates once. An
instance may carry a detail, "what failed: reason (expected ...)"; `str(error)` is the line.
"""

from __future__ import annotations

import errno as _errno
from typing import ClassVar

from mqfs import limits


def shortened(text: str) -> str:
    """The text, cut at a character and ended by "..." where it exceeds limits.ERROR_BYTES."""
    if len(text) * 4 <= limits.ERROR_BYTES or len(data := text.encode(errors="replace")) <= limits.ERROR_BYTES:
        return text
    return data[: limits.ERROR_BYTES - 3].decode(errors="ignore") + "..."


def printable(text: str) -> str:
    """The text for a terminal: control characters and changes of direction are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class MqfsError(Exception):
    """Base of all conditions. `errno` for FUSE, .L and .u; `str()` for 9P2000 and logs; `http` for web front ends."""

    errno: ClassVar[int] = _errno.EIO
    text: ClassVar[str] = "input/output error"
    http: ClassVar[int] = 500
    whole: ClassVar[bool] = False  # the detail is never cut: it is the operator's own, and paths are long

    def __init__(self, detail: str = "") -> None:
        self.detail = printable(detail) if self.whole else shortened(printable(shortened(detail)))
        super().__init__(self.detail)

    def __str__(self) -> str:
        return f"{self.text}: {self.detail}" if self.detail else self.text


class BadName(MqfsError):
    errno, text, http = _errno.EINVAL, "bad file name", 400


class BadCommand(MqfsError):
    """An invalid line written to `ctl` or `.cursor`; the whole write is refused."""

    errno, text, http = _errno.EINVAL, "bad control message", 400


class BadRequest(MqfsError):
    """A call that no state of the tree could satisfy (an invalid offset, flag or mode)."""

    errno, text, http = _errno.EINVAL, "bad request", 400


class NotFound(MqfsError):
    errno, text, http = _errno.ENOENT, "file does not exist", 404


class Exists(MqfsError):
    errno, text, http = _errno.EEXIST, "file already exists", 409


class Denied(MqfsError):
    """The mode bits refuse it."""

    errno, text, http = _errno.EACCES, "permission denied", 403


class NotPermitted(MqfsError):
    """Refused regardless of mode bits: not the owner, protected, or never done by the tree."""

    errno, text, http = _errno.EPERM, "operation not permitted", 403


class NotDirectory(MqfsError):
    errno, text, http = _errno.ENOTDIR, "not a directory", 400


class IsDirectory(MqfsError):
    errno, text, http = _errno.EISDIR, "is a directory", 400


class NotEmpty(MqfsError):
    errno, text, http = _errno.ENOTEMPTY, "directory not empty", 409


class Busy(MqfsError):
    errno, text, http = _errno.EBUSY, "busy", 409


class TooLong(MqfsError):
    errno, text, http = _errno.EMSGSIZE, "message too long", 413


class FellBehind(MqfsError):
    """Raised once to a reader that was overtaken by trimming; its next read continues at the oldest message."""

    errno, text, http = _errno.EPIPE, "reader fell behind", 410
    lost = 0  # messages, at most; the library sets it, 0 elsewhere


class Interrupted(MqfsError):
    errno, text, http = _errno.EINTR, "interrupted", 503


class Again(MqfsError):
    """O_NONBLOCK, and the call would wait."""

    errno, text, http = _errno.EAGAIN, "resource temporarily unavailable", 503


class StreamFull(MqfsError):
    """`full reject` at `depth`."""

    errno, text, http = _errno.ENOSPC, "stream is full", 507


class DiskFull(MqfsError):
    errno, text, http = _errno.ENOSPC, "no space left on device", 507


class DiskFailed(MqfsError):
    """A read or write of the store failed, or a record did not pass its check."""

    errno, text, http = _errno.EIO, "input/output error", 500


class Damaged(DiskFailed):
    """A corrupt record of the log; each reader gets it once and continues after `sequence`."""

    def __init__(self, sequence: int, detail: str = "") -> None:
        super().__init__(detail or f"record {sequence} is damaged and was set aside")
        self.sequence = sequence


class ReadOnly(MqfsError):
    """A write or sync of the group's log failed once: nothing more is written, reads continue."""

    errno, text, http = _errno.EROFS, "group is read-only", 503


class Stale(MqfsError):
    errno, text, http = _errno.ESTALE, "stale", 410


class OverLimit(MqfsError):
    """One of the bounds in limits.py; the detail names it and its value."""

    errno, text, http = _errno.ENFILE, "limit reached", 429


class OverQuota(MqfsError):
    """A bound that the operator set for one user (`--limit`); the detail names it."""

    errno, text, http = _errno.EDQUOT, "quota exceeded", 429


class Unsupported(MqfsError):
    errno, text, http = _errno.EOPNOTSUPP, "operation not supported", 405


class Disconnected(MqfsError):
    """The server is gone, or the client was closed; the outcome of a call in flight is unknown."""

    errno, text, http = _errno.ENOTCONN, "not connected", 503

    def __init__(self, detail: str = "", *, final: bool = False) -> None:
        """`final`: no later attempt can succeed, as the client was closed or is the parent process's."""
        super().__init__(detail)
        self.final = final


class BadStore(MqfsError):
    """A store that cannot be opened: not one, of another version, locked, or beyond repair without `mqfs check`."""

    errno, text, http = _errno.EINVAL, "bad store", 500
    whole = True


class BadRing(MqfsError):
    """Shared memory that is no ring of this version and boot, or whose state is corrupt."""

    errno, text, http = _errno.EINVAL, "bad ring", 500


class BadFrame(MqfsError):
    """A 9P message that breaks the protocol; it ends its connection and nothing else."""

    errno, text, http = _errno.EPROTO, "malformed 9P message", 400


class BadTokens(BadFrame):
    """Wrong tokens, one after another; it ends its connection as a broken protocol does."""

    errno, text, http = _errno.EACCES, "permission denied", 401


class BadFid(MqfsError):
    """A 9P fid that is unknown, in use, or not open as the request needs it."""

    errno, text, http = _errno.EBADF, "bad use of a fid", 400


class BadAddress(MqfsError):
    """An address that cannot be used."""

    errno, text, http = _errno.EINVAL, "bad address", 400
    whole = True


class BadConfig(MqfsError):
    """A configuration file that is unreadable or invalid; the detail names the file and the key."""

    errno, text, http = _errno.EINVAL, "bad configuration", 400
    whole = True


class MountError(MqfsError):
    """An unusable mount point, or no FUSE; the detail has the remedy."""

    errno, text, http = _errno.EINVAL, "cannot mount", 400
    whole = True


class NoAttribute(MqfsError):
    """An extended attribute: no file of the tree has any."""

    errno, text, http = _errno.ENODATA, "no such attribute", 404


class NoAuthentication(MqfsError):
    """The answer to Tauth where the socket identifies the client."""

    errno, text, http = _errno.ENOENT, "no authentication required", 400


class RemoteError(MqfsError):
    """A refusal that this table does not have, with the server's own text."""

    errno, text, http = _errno.EIO, "the server refused", 502
    whole = True

    def __str__(self) -> str:
        return self.detail or self.text
