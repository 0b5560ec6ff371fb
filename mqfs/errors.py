"""Every condition the tree can refuse with: one class each, with its errno, its 9P text and its HTTP status.

This is the only such table. The engine raises these where the condition is known; each front end translates once. An
instance may carry a detail, "what failed: reason (expected ...)", which is what `str(error)` gives; 9P puts the class's
text before it. Of each docstring the first paragraph says what the condition means, the last what to do: the
page docs/reference/errors.md is made of them.
"""

from __future__ import annotations

import errno as _errno
import re
from collections.abc import Iterable
from typing import ClassVar

from mqfs import limits

_QUOTED = 32  # characters of an unknown word that are repeated
_SHORT_LIST = 100  # characters of a list of words that is shown beside the nearest of them
NOT_INSTALLED = "not installed (expected the extra {0}: pip install '.[{0}]' in a clone, or 'FILE.whl[{0}]')"
_LONGEST_LIST = 175  # with the rest of the text it has to fit limits.ERROR_BYTES


def shortened(text: str) -> str:
    """Return the text, cut at a character and ended by "..." if it exceeds limits.ERROR_BYTES."""
    if len(text) * 4 <= limits.ERROR_BYTES or len(data := text.encode(errors="replace")) <= limits.ERROR_BYTES:
        return text
    return data[: limits.ERROR_BYTES - 3].decode(errors="ignore") + "..."


def unknown(what: str, word: str, known: Iterable[str]) -> str:
    """Return the error text for a word that is not among the `known` ones: it has these, and the nearest of them if one
    is near; of a long list the nearest only."""
    import difflib  # here, as most programs never need it

    words, word = list(known), word[:_QUOTED]
    near = difflib.get_close_matches(word, words, 1)
    hints = [f"did you mean {near[0]!r}?"] if near else []
    listed = " ".join(words)
    if not near or len(listed) <= _SHORT_LIST:
        if len(listed) > _LONGEST_LIST:
            listed = listed[: listed.rindex(" ", 0, _LONGEST_LIST - 3)] + " ..."
        hints.insert(0, f"expected one of {listed}")
    return f"unknown {what} {word!r} ({'; '.join(hints)})"


def printable(text: str) -> str:
    """Return the text with control characters and changes of direction escaped, for a terminal."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


class MqfsError(Exception):
    """Base of all conditions.

    `errno` for FUSE, .L and .u; `text` for 9P2000, which is contract; `http` for web front ends; `str()` for
    people: logs, tools, Python.
    """

    errno: ClassVar[int] = _errno.EIO
    text: ClassVar[str] = "input/output error"
    http: ClassVar[int] = 500
    whole: ClassVar[bool] = False  # the detail is never cut: it is the operator's own, and paths are long

    def __init__(self, detail: str = "") -> None:
        self.detail = printable(detail) if self.whole else shortened(printable(shortened(detail)))
        super().__init__(self.detail)

    def __str__(self) -> str:
        """Return the text for people: the detail, or the class's text without one."""
        return self.detail or self.text

    def wire_text(self) -> str:
        """Return the text of Rerror: the class's, which is contract, and the detail."""
        return f"{self.text}: {self.detail}" if self.detail else self.text


class BadName(MqfsError):
    """The name of a stream, group, consumer or part is not allowed.

    Use 1 to 255 bytes of UTF-8 without a slash, control characters or a leading dot, and not `ctl` or `order`.
    """

    errno, text, http = _errno.EINVAL, "bad file name", 400


class BadCommand(MqfsError):
    """A line written to `ctl`, `.cursor` or a consumer, or a write to `.put`, `.batch` or `.txn/ctl`, is invalid. All
    of the write is refused.

    Correct what the text names, and write all of it again.
    """

    errno, text, http = _errno.EINVAL, "bad control message", 400


class BadRequest(MqfsError):
    """No state of the tree could satisfy the call: an invalid offset, flag, mode or argument.

    Correct the call. A repeat fails in the same way.
    """

    errno, text, http = _errno.EINVAL, "bad request", 400


class NotFound(MqfsError):
    """There is no group, stream, view, consumer, message or part of that name, or it was removed.

    Create it, or correct the name.
    """

    errno, text, http = _errno.ENOENT, "file does not exist", 404


class Exists(MqfsError):
    """The name is taken by a stream, group, view, consumer or part.

    Use what exists, remove it first, or choose another name.
    """

    errno, text, http = _errno.EEXIST, "file already exists", 409


class Conflict(MqfsError):
    """The newest message of the stream is not the one that `expect` names: another was written, or it is not retained.

    Read the stream to its end, and decide again. The text has the sequence of the newest message; 0: it has none.
    """

    errno, text, http = _errno.EEXIST, "newest message differs", 412

    @property
    def newest(self) -> int:
        """The sequence of the stream's newest message; 0 where it has none, or none is known."""
        found = re.search(r"newest message (\d+)", self.detail)
        return int(found[1]) if found else 0


class Denied(MqfsError):
    """The mode of the file, or the token of the client, does not permit the call.

    Ask the owner for `chmod` or `chown`, or the operator for a token with a wider scope or path.
    """

    errno, text, http = _errno.EACCES, "permission denied", 403


class NotPermitted(MqfsError):
    """The call is refused whatever the mode is: not the owner, a protected group, or a change that the tree never
    makes.

    Call as the owner, or write `protect off` to `ctl` first.
    """

    errno, text, http = _errno.EPERM, "operation not permitted", 403


class NotDirectory(MqfsError):
    """The path goes through a file, or the file is not a group.

    Correct the path.
    """

    errno, text, http = _errno.ENOTDIR, "not a directory", 400


class IsDirectory(MqfsError):
    """The path is a group, and the call is for a file.

    Name a stream in the group.
    """

    errno, text, http = _errno.EISDIR, "is a directory", 400


class NotEmpty(MqfsError):
    """The group still has streams or groups.

    Remove them first.
    """

    errno, text, http = _errno.ENOTEMPTY, "directory not empty", 409


class Busy(MqfsError):
    """Claims, messages, bound patterns or open files are in the way of the call.

    Do what the text names (`ack`, `clear`, `unbind`, close), or try again later.
    """

    errno, text, http = _errno.EBUSY, "busy", 409


class TooLong(MqfsError):
    """The message, line or command is longer than its bound. Nothing of it was kept.

    Send less at once. The library sends a large body in parts.
    """

    errno, text, http = _errno.EMSGSIZE, "message too long", 413


class FellBehind(MqfsError):
    """Messages were removed before the reader had read them. It is raised once.

    Read on: the next read continues at the oldest message. Raise `depth`, or use a consumer.
    """

    errno, text, http = _errno.EPIPE, "reader fell behind", 410
    lost = 0  # messages, at most; the library sets it, 0 elsewhere


class Interrupted(MqfsError):
    """The call ended while it waited, by a signal, a close or a stopping server. Nothing was taken or written.

    Repeat the call if it is still wanted.
    """

    errno, text, http = _errno.EINTR, "interrupted", 503


class Again(MqfsError):
    """The call would wait, and the file is open with `O_NONBLOCK`.

    Wait with poll(2), then repeat the call.
    """

    errno, text, http = _errno.EAGAIN, "resource temporarily unavailable", 503


class StreamFull(MqfsError):
    """The stream has its `depth`, the group's log its bound, or a consumer its `backlog`, with `full reject`.

    Publish again when messages were acknowledged or cleared. Raise the bound, or choose another `full`.
    """

    errno, text, http = _errno.ENOSPC, "stream is full", 507


class DiskFull(MqfsError):
    """The disk of the store has no room. The write was not kept.

    Free room on the disk: writes then succeed without a restart.
    """

    errno, text, http = _errno.ENOSPC, "no space left on device", 507


class DiskFailed(MqfsError):
    """A read or write of the store failed, or a record did not pass its check.

    See the server's log, then the disk. Run `mqfs check` on the stopped store. A failed write is not visible, but
    may be after a restart, if the disk could neither complete it nor undo it.
    """

    errno, text, http = _errno.EIO, "input/output error", 500


class Damaged(DiskFailed):
    """A record of the log is corrupt. Each reader gets this once, and continues after `sequence`.

    Read on. The server copied the record to the store's `quarantine`; its log has the place.
    """

    def __init__(self, sequence: int, detail: str = "") -> None:
        super().__init__(detail or f"record {sequence}: damaged (set aside; the next read continues after it)")
        self.sequence = sequence


class ReadOnly(MqfsError):
    """A write or sync of the group's log failed once. Nothing more is written, reads continue.

    Mend the disk, and restart the server.
    """

    errno, text, http = _errno.EROFS, "group is read-only", 503


class Stale(MqfsError):
    """A claim, ring or snapshot is no longer valid: it expired, its consumer or stream was removed, or its connection
    was closed.

    Read again for a new claim, or open the file again.
    """

    errno, text, http = _errno.ESTALE, "stale", 410


class OverLimit(MqfsError):
    """One of the bounds of mqfs(4), LIMITS, is reached; the text names it and its value.

    Use fewer of them at a time, or spread them over users and groups.
    """

    errno, text, http = _errno.ENFILE, "limit reached", 429


class OverQuota(MqfsError):
    """A bound that the operator set for one user (`--limit`) is reached; the text names it.

    Wait, or ask the operator for a larger quota.
    """

    errno, text, http = _errno.EDQUOT, "quota exceeded", 429


class Unsupported(MqfsError):
    """The server, the group's settings or the protocol's dialect do not have this call.

    Use the way that the text names, such as the files where there is no ring.
    """

    errno, text, http = _errno.EOPNOTSUPP, "operation not supported", 405


class Disconnected(MqfsError):
    """The server cannot be reached, the connection was lost, or the client was closed. The outcome of a call in flight
    is unknown.

    Start the server, or connect again. Repeat a publish that must not be lost, with an `id` so that it counts once.
    """

    errno, text, http = _errno.ENOTCONN, "not connected", 503

    def __init__(self, detail: str = "", *, final: bool = False) -> None:
        """`final`: no later attempt can succeed, as the client was closed or is the parent process's."""
        super().__init__(detail)
        self.final = final


class BadStore(MqfsError):
    """The store cannot be opened: not one, of another version, in use, or damaged.

    Name the right directory, end the process that has it, or run `mqfs check`.
    """

    errno, text, http = _errno.EINVAL, "bad store", 500
    whole = True


class BadReplica(MqfsError):
    """The replicated log cannot be used: unreachable, another store's, too old to fence, or damaged.

    Do what the text names: correct `--replica`, update the engine, or start it.
    """

    errno, text, http = _errno.EIO, "bad replica", 503
    whole = True


class Standby(Disconnected):
    """This server is a standby: another one has the tree. The text has its address.

    Give all addresses, with commas between: clients take the one that serves.
    """

    errno, text, http = _errno.EREMOTE, "standby", 503


class BadRing(MqfsError):
    """The shared memory is not a ring of this version and boot, or its state is corrupt.

    Attach again. The library falls back to the files.
    """

    errno, text, http = _errno.EINVAL, "bad ring", 500


class BadFrame(MqfsError):
    """A 9P message breaks the protocol. It ends its connection and nothing else.

    Mend the client.
    """

    errno, text, http = _errno.EPROTO, "malformed 9P message", 400


class BadTokens(BadFrame):
    """Several wrong tokens came, one after another. It ends its connection as a broken protocol does.

    Correct the token: `mqfs token ls` has the IDs that the server knows.
    """

    errno, text, http = _errno.EACCES, "permission denied", 401


class BadFid(MqfsError):
    """A 9P fid is unknown, in use, or not open as the request needs it.

    Mend the client.
    """

    errno, text, http = _errno.EBADF, "bad use of a fid", 400


class BadAddress(MqfsError):
    """The address is malformed or cannot be used.

    Write unix!PATH, tcp!HOST!PORT, tls!HOST!PORT or HOST:PORT, and see that no other server has it.
    """

    errno, text, http = _errno.EINVAL, "bad address", 400
    whole = True


class BadConfig(MqfsError):
    """An option or a configuration file is unreadable or invalid; the text names the option, file and key.

    Correct it, and start again.
    """

    errno, text, http = _errno.EINVAL, "bad configuration", 400
    whole = True


class MountError(MqfsError):
    """The mount point is unusable, or there is no FUSE.

    Do what the text names, or serve 9P by `--listen`.
    """

    errno, text, http = _errno.EINVAL, "cannot mount", 400
    whole = True


class NoAttribute(MqfsError):
    """Extended attributes: no file of the tree has any.

    Nothing: programs go on without them.
    """

    errno, text, http = _errno.ENODATA, "no such attribute", 404


class NoAuthentication(MqfsError):
    """The answer to Tauth where the socket identifies the client.

    Attach without authentication, as clients do by themselves.
    """

    errno, text, http = _errno.ENOENT, "no authentication required", 400


class RemoteError(MqfsError):
    """The server refused with an error that this table does not have; the text is the server's own.

    See the server's log. Use a client and a server of the same version.
    """

    errno, text, http = _errno.EIO, "the server refused", 502
    whole = True

    def wire_text(self) -> str:
        return str(self)


def ungrouped(error: BaseException) -> BaseException:
    """Return the single error in nested exception groups, as nurseries raise it; a group of several unchanged."""
    while isinstance(error, BaseExceptionGroup) and len(error.exceptions) == 1:
        error = error.exceptions[0]
    return error
