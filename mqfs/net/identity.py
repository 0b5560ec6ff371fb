"""Names and numbers of users and groups, from a small cache of the system's database. It decides no permission.

The database may be a directory service, slow or unreachable for a while. Every answer is kept:

    age of the answer   0 .... NAMES_S            the answer
                        NAMES_S .. NAMES_KEPT_S   asked again; where that fails, or takes NAMES_WAIT_S, the last answer
    no answer yet       NotAnswered; a name that is only shown is a number after NAMES_WAIT_S

A thread that is `serving_others` waits for no look-up: each look-up has a thread of its own, one at a time for a user,
and calls back a caller that needs it. All other threads ask the database themselves, and wait.
"""

from __future__ import annotations

import contextlib
import ctypes
import grp
import logging
import math
import os
import pwd
import re
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from mqfs import limits
from mqfs.errors import BadRequest, Busy
from mqfs.model import Grant, User

log = logging.getLogger("mqfs.net")

NOBODY = 65_534
NONUNAME = 0xFFFF_FFFF  # no number: the user has only a name
NAME_BYTES = 256  # of a user or group: the limit of Linux (LOGIN_NAME_MAX)
_MANY_GROUPS = 64  # of one user; for a user with more, ask twice


def file_mask() -> int:
    """Return the umask of this process. It is read without setting it: other threads may create files meanwhile."""
    with open("/proc/self/status", encoding="ascii", errors="replace") as file:
        found = re.search(r"^Umask:\s*([0-7]+)", file.read(), re.MULTILINE)
    return int(found[1], 8) if found else 0o022


# ------------------------------------------------------------ the last answers


class NotAnswered(Busy):
    """Raised while the system's database has not answered. Retry when `subscribe` calls back, or after `within_s`."""

    def __init__(self, what: str, looking: _LookUp | None, within_s: float) -> None:
        super().__init__(f"{what}: no answer of the user database yet (expected a retry)")
        self._looking, self.within_s = looking, within_s

    def subscribe(self, then: Callable[[], None]) -> None:
        """Call `then` once there is an answer, whatever it is: on another thread, or at once."""
        if self._looking is not None:
            self._looking.subscribe(then)


class _Answer(NamedTuple):
    value: Any  # None: there is no such user, group or name
    asked: float  # monotonic, as is `found`
    found: float  # when the database last had the value


Ask = Callable[[Any], Any]  # raises KeyError, OSError
Key = tuple[Ask, Any]
_answers: dict[Key, _Answer] = {}  # the least recently asked first
_looking: dict[Key, _LookUp] = {}


class _Thread(threading.local):
    servers = 0


_thread = _Thread()


@contextlib.contextmanager
def serving_others() -> Iterator[None]:
    """Have the calling thread wait for no look-up within this context: see the head of this module."""
    _thread.servers += 1
    try:
        yield
    finally:
        _thread.servers -= 1


def _answer(ask: Ask, of: Any, what: str, *, shown: bool = False) -> Any:
    """Return the database's answer, or None if it has none. Raises NotAnswered, on a thread that serves others.

    `what`: the question in words. `shown`: the answer decides nothing, and is not waited for while any look-up takes
    long.
    """
    key, now = (ask, of), time.monotonic()
    known = _answers.get(key)
    if known is not None and now - known.asked < limits.NAMES_S:
        return known.value
    if not _thread.servers:
        return _look_up(key)
    looking = _looking.get(key) or _LookUp.begin(key)
    wait_s = limits.NAMES_RETRY_S if looking is None else looking.began + limits.NAMES_WAIT_S - now
    if known is not None and known.value is not None and now - known.found < limits.NAMES_KEPT_S:
        if shown or wait_s <= 0:
            return known.value
    elif shown:
        if any(other.began + limits.NAMES_WAIT_S <= now for other in list(_looking.values())):
            return None
    elif looking is not None:
        wait_s = math.inf
    raise NotAnswered(what, looking, wait_s)


def _look_up(key: Key) -> Any:
    """Ask the database on this thread. A user that it no longer has keeps the last answer for a while: an unreachable
    service looks the same as a removed user."""
    ask, of = key
    value = None
    try:
        value = ask(of)
    except (KeyError, OverflowError, ValueError):
        pass
    except OSError as error:
        log.warning("user database: %s", error)
    now, known = time.monotonic(), _answers.pop(key, None)
    answer = _Answer(value, now, now)
    if value is None and known is not None and known.value is not None and now - known.found < limits.NAMES_KEPT_S:
        answer = known._replace(asked=now)
    with contextlib.suppress(StopIteration, RuntimeError):  # other threads change it, too
        while len(_answers) >= limits.NAMES_KEPT:
            _answers.pop(next(iter(_answers)), None)
    _answers[key] = answer
    return answer.value


class _LookUp:
    """One look-up in progress, on a thread of its own."""

    def __init__(self, key: Key) -> None:
        self._key, self.began = key, time.monotonic()
        self._lock = threading.Lock()
        self._then: list[Callable[[], None]] | None = []  # None: answered

    @classmethod
    def begin(cls, key: Key) -> _LookUp | None:
        """Start a look-up. Return None if too many are in progress, or no thread can be started."""
        if len(_looking) >= limits.NAMES_ASKED:
            return None
        made = _looking[key] = cls(key)
        try:
            threading.Thread(target=made._run, name="names", daemon=True).start()
        except RuntimeError as error:
            log.warning("user database not asked: %s", error)
            del _looking[key]
            return None
        return made

    def _run(self) -> None:
        try:
            _look_up(self._key)
        finally:
            _looking.pop(self._key, None)
            with self._lock:
                waiting, self._then = self._then or [], None
            for then in waiting:
                then()

    def subscribe(self, then: Callable[[], None]) -> None:
        with self._lock:
            if self._then is not None:
                self._then.append(then)
                return
        then()


# ------------------------------------------------------------ names and numbers


def _name_of_user(uid: int) -> str:
    return pwd.getpwuid(uid).pw_name


def _name_of_group(gid: int) -> str:
    return grp.getgrgid(gid).gr_name


def _number_of_user(name: str) -> int:
    return pwd.getpwnam(name).pw_uid


def _number_of_group(name: str) -> int:
    return grp.getgrnam(name).gr_gid


def user_name(uid: int) -> str:
    """Return the name of a user, or its number if it has none. For decisions and storage. Raises NotAnswered."""
    return _answer(_name_of_user, uid, f"user {uid}") or str(uid)


def group_name(gid: int) -> str:
    """Return the name of a group, or its number if it has none. For decisions and storage. Raises NotAnswered."""
    return _answer(_name_of_group, gid, f"group {gid}") or str(gid)


def is_named(uid: int, uname: str, n_uname: int) -> bool:
    """Whether an attach names that user, or no user. Never looks up a name that a client chose. Raises NotAnswered."""
    if n_uname != NONUNAME:
        return n_uname == uid
    return uname in ("", str(uid)) or uname == user_name(uid)


def shown_user(uid: int) -> str:
    """Return the name of a user for display, or its number, also if the database takes longer than NAMES_WAIT_S. Until
    then raises NotAnswered."""
    return _answer(_name_of_user, uid, f"user {uid}", shown=True) or str(uid)


def shown_group(gid: int) -> str:
    """Return the name of a group for display, as `shown_user` does. Raises NotAnswered."""
    return _answer(_name_of_group, gid, f"group {gid}", shown=True) or str(gid)


def user_number(name: str) -> int | None:
    """Return the number of a user by name (or by number in digits), or None if there is none. Raises NotAnswered."""
    return _number(_number_of_user, name, "user")


def group_number(name: str) -> int | None:
    """Return the number of a group by name (or by number in digits), or None if there is none. Raises NotAnswered."""
    return _number(_number_of_group, name, "group")


def _number(ask: Callable[[str], int], name: str, kind: str) -> int | None:
    if len(name) > NAME_BYTES:
        return None
    found: int | None = _answer(ask, name, f"{kind} {name!r}")
    if found is not None:
        return found
    digits = name.isascii() and name.isdigit() and len(name) <= len(str(NONUNAME))  # int() refuses thousands of digits
    return int(name) if digits and int(name) < NONUNAME else None


def group_wanted(name: str, user: User) -> int:
    """Return the number of a group that a client named: one of the user's own, or any for root. Raises BadRequest,
    NotAnswered."""
    for own in (user.gid, *user.groups):
        if name in (group_name(own), str(own)):
            return own
    gid = group_number(name) if user.uid == 0 or name.isdigit() else None
    if gid is None:
        raise BadRequest(f"unknown group {name!r} (expected one of the user's groups)")
    return gid


# ------------------------------------------------------------ users


def _membership(uid: int) -> tuple[int, frozenset[int]]:
    """Return a user's primary and supplementary groups."""
    known = pwd.getpwuid(uid)
    return known.pw_gid, frozenset(_groups(known.pw_name, known.pw_gid))


def _groups(name: str, primary: int) -> list[int]:
    """Return a user's groups as os.getgrouplist would; that function blocks all other threads meanwhile."""
    size = _MANY_GROUPS
    while True:
        count, found = ctypes.c_int(size), (ctypes.c_uint32 * size)()
        if ctypes.CDLL(None).getgrouplist(os.fsencode(name), ctypes.c_uint32(primary), found, ctypes.byref(count)) >= 0:
            return found[: count.value]
        size = max(count.value, 2 * size)


def user(uid: int, where: str, *, gid: int | None = None, pid: int = 0, grant: Grant | None = None) -> User:
    """Return a user with its groups in the system's database. `gid`: its group by the socket, if the database does not
    have the user. `grant`: of its token. Raises NotAnswered."""
    unknown = NOBODY if gid is None else gid, frozenset[int]()
    primary, groups = _answer(_membership, uid, f"user {uid}") or unknown
    return User(uid, primary, groups, pid, where, grant)
