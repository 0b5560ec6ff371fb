"""Tokens: secrets that identify TCP clients, each written to the fid of a Tauth.

`Tokens` reads its file again when the file has changed. `Proof` is the state of one such fid. The server chooses the
connections that may use tokens. The format of the file is in syntax/lines.py.
"""

from __future__ import annotations

import hmac
import itertools
import logging
import math
import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Set

import attrs

from mqfs import limits
from mqfs.errors import BadCommand, BadConfig, BadRequest, Denied, TooLong
from mqfs.model import Grant, User
from mqfs.net import audit, challenge, identity
from mqfs.net.audit import Audit
from mqfs.net.challenge import Answer
from mqfs.net.identity import NotAnswered
from mqfs.syntax.lines import TokenLine, digest, id_of, parse_line

log = logging.getLogger("mqfs.tokens")
_NO_DIGEST = bytes(32)


@attrs.frozen
class Entry:
    """A token of the file. `user`: as named on its line."""

    user: str
    grant: Grant
    digest: bytes
    expires: float = math.inf


@attrs.frozen
class Reading:
    """One reading of the file. `number`: of the reading, in the order in which they began. `signature`: of the file,
    taken before. `unknown`: a text for each line of an unknown user. `is_news`: to be logged, see `Tokens.read`."""

    number: int
    signature: tuple[int, ...]
    entries: list[Entry]
    unknown: list[str]
    is_news: bool


class Tokens:
    """The tokens of one file. A user may have several.

    `on_ended` are called with the grants of tokens that are revoked, changed or expired: a front end ends their
    connections.

        read, on any thread   ->  Reading 7  ->  replace: in force, unless a later one already is
        it fails              ->  None: all stays; the signature does, too, so that the next tick asks for a reading;
                                  of an invalid file that has not changed, one after limits.NAMES_S

    All entries of the reading are kept, expired ones too: the wall clock may have been wrong, and be corrected.
    """

    def __init__(self, path: str, audit: Audit = audit.OFF, *, required: bool = False) -> None:
        """`required`: refuse clients over TCP without a token. Raises BadConfig."""
        self.path, self._audit, self.required = path, audit, required
        self.on_ended: list[Callable[[Set[Grant]], None]] = []
        self._entries: list[Entry] = []  # not expired
        self._seen: set[str] = set()  # IDs of tokens whose first use was audited
        self._numbers = itertools.count()
        self._said: tuple[tuple[int, ...], list[str]] = self._sign(), []  # the last reading logged: signature, faults
        self._reading = Reading(next(self._numbers), self._said[0], read_entries(path), [], is_news=False)
        self._look_up_at = math.inf  # monotonic: when to look up unknown users again
        self._invalid: tuple[tuple[int, ...], float] = (), -math.inf  # signature; monotonic time of the next reading
        self._put_in_force()

    def user(self, secret: bytes, where: str = "") -> Grant | None:
        """Return the grant of a secret, or None if unknown. Takes equally long for all secrets of a form, also unknown
        ones. `where`: the client, for the audit."""
        shown, token = digest(secret), id_of(secret)
        entry = self._by_id.get(token)
        if not hmac.compare_digest(entry.digest if entry is not None else _NO_DIGEST, shown):
            entry = None
        return self._known(entry, where)

    def user_of_answer(self, answer: Answer, server_nonce: str, user: str, where: str = "") -> tuple[Grant | None, str]:
        """Return the grant of the token that answered a challenge, and the server's proof. `user`: as in the Tauth."""
        entry = self._by_id.get(answer.id)
        key = entry.digest if entry is not None else _NO_DIGEST
        if not hmac.compare_digest(
            challenge.prove(key, challenge.CLIENT, server_nonce, answer.nonce, user), answer.proof
        ):
            entry = None
        grant = self._known(entry, where)
        if entry is None or grant is None:
            return None, ""
        return grant, challenge.prove(entry.digest, challenge.SERVER, server_nonce, answer.nonce, user)

    def _known(self, entry: Entry | None, where: str) -> Grant | None:
        """Return the grant of an entry, or None if it is None or expired. Refusals and a token's first use are
        audited."""
        if entry is None or entry.expires <= time.time():
            stranger = User(identity.NOBODY, identity.NOBODY, where=where)
            self._audit.note(stranger, "token", "", "unknown or expired", status="refused")
            return None
        if entry.grant.id not in self._seen:
            self._seen.add(entry.grant.id)
            self._audit.note(User(entry.grant.uid, 0, where=where, grant=entry.grant), "token", "", "first use")
        return entry.grant

    def tick(self) -> bool:
        """End expired tokens, once a second. Return whether to read the file again: it changed or could not be read, or
        was invalid or had unknown users a while ago."""
        if not self._expired <= time.time() < self._expires:
            self._put_in_force()
        signature, (invalid, again_at) = self._sign(), self._invalid
        if signature == self._reading.signature:
            return time.monotonic() >= self._look_up_at
        return signature != invalid or time.monotonic() >= again_at

    def read(self, *, asked: bool = True) -> Reading | None:
        """Read the tokens of the file, for `replace`; None if it is invalid. On any thread, as users are looked up.
        `asked`: log the faults; else only if the file or its faults differ from those of the reading before."""
        number, signature, entries = next(self._numbers), self._sign(), None
        wrong: list[str] = []
        try:
            entries = self._resolved(read_bytes(self.path), wrong)
        except BadConfig as error:
            wrong = [f"{error}; the tokens stay as they were"]
            if not isinstance(error, _NotRead):
                self._invalid = signature, time.monotonic() + limits.NAMES_S
        is_news, self._said = asked or self._said != (signature, wrong), (signature, wrong)
        for text in wrong if is_news else ():
            log.warning("%s", text)
        return None if entries is None else Reading(number, signature, entries, wrong, is_news)

    def _resolved(self, data: bytes, unknown: list[str]) -> list[Entry]:
        """Return the tokens in the data of the file. Raises BadConfig.

        `unknown`: gets a text for each line whose user the system does not know. An unreachable directory service looks
        the same as a removed user. So a token in force stays, and a new token is left out.
        """
        entries = []
        known = {(entry.grant.id, entry.digest, entry.user): entry.grant.uid for entry in self._reading.entries}
        for where, line in parse_lines(self.path, data):
            uid = identity.user_number(line.user)
            if uid is None:
                uid = known.get((line.id, line.digest, line.user))
                ends = "is not valid" if uid is None else f"stays that of user {uid}"
                unknown.append(f"{where}: unknown user {line.user!r}: token {line.id} {ends}")
            if uid is not None:
                entries.append(_entry(line, uid))
        return entries

    def replace(self, reading: Reading | None) -> None:
        """Put the tokens in force that `read` returned, unless those of a later reading are."""
        if reading is None or reading.number < self._reading.number:
            return
        self._reading = reading
        self._look_up_at = time.monotonic() + limits.NAMES_S if reading.unknown else math.inf
        self._put_in_force()
        if reading.is_news:
            log.info("%s: %d tokens read", self.path, len(self._entries))

    def _sign(self) -> tuple[int, ...]:
        """Return a value that changes when the file is changed or replaced."""
        try:
            status = os.stat(self.path)
        except OSError:
            return ()
        return status.st_ino, status.st_mtime_ns, status.st_ctime_ns, status.st_size

    def _put_in_force(self) -> None:
        """Put the unexpired entries of the reading in force, and set when to do so again: at an expiry, or if the clock
        is set back before one."""
        before, now = {(entry.grant, entry.digest) for entry in self._entries}, time.time()
        self._entries = [entry for entry in self._reading.entries if entry.expires > now]
        ends = [entry.expires for entry in self._reading.entries]
        self._expires = min((end for end in ends if end > now), default=math.inf)
        self._expired = max((end for end in ends if end <= now), default=-math.inf)
        self._by_id = {entry.grant.id: entry for entry in self._entries}
        if ended := {grant for grant, _ in before - {(entry.grant, entry.digest) for entry in self._entries}}:
            self._seen -= {grant.id for grant in ended}
            for end in self.on_ended:
                end(ended)


def read_entries(path: str) -> list[Entry]:
    """Return the tokens of a file. Raises BadConfig, also if the system does not know a user."""
    entries = []
    for where, line in parse_lines(path, read_bytes(path)):
        uid = identity.user_number(line.user)
        if uid is None:
            raise BadConfig(f"{where}: unknown user {line.user!r} (expected one of getent passwd)")
        entries.append(_entry(line, uid))
    return entries


def _entry(line: TokenLine, uid: int) -> Entry:
    return Entry(line.user, Grant(uid, line.id, line.scope, line.path), line.digest, line.expires)


def parse_lines(path: str, data: bytes) -> list[tuple[str, TokenLine]]:
    """Return the tokens in a file's data, each after its location for error texts. Raises BadConfig."""
    found = [
        (f"--token-file {path}, line {number}", parse_token(path, number, line))
        for number, line in enumerate(data.splitlines(), 1)
        if is_token(line)
    ]
    ids = Counter(line.id for _, line in found)
    if twice := [one for one, count in ids.items() if count > 1]:
        raise BadConfig(f"--token-file {path}: ID {twice[0]} twice (expected one line an ID)")
    return found


class _NotRead(BadConfig):
    """Raised if a file cannot be read as it is, whatever is in it."""


def read_bytes(path: str, owner: int | None = None) -> bytes:
    """Return the contents of a file that its owner (root, this user, or `owner`) alone may access. Raises BadConfig."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())
            data = file.read(limits.TOKEN_FILE_BYTES + 1) if stat.S_ISREG(status.st_mode) else b""
    except OSError as error:
        raise _NotRead(f"--token-file {path}: {error.strerror} (expected a readable file)") from None
    if not stat.S_ISREG(status.st_mode):
        raise _NotRead(f"--token-file {path}: not a regular file (expected a file of mode 600)")
    if status.st_mode & 0o077 or status.st_uid not in (0, os.geteuid(), owner):
        raise _NotRead(f"--token-file {path}: open to others (expected mode 600, owned by the server's user or root)")
    if len(data) > limits.TOKEN_FILE_BYTES:
        raise BadConfig(f"--token-file {path}: too long (expected at most {limits.TOKEN_FILE_BYTES} bytes)")
    return data


def _open_at_once(path: str, flags: int) -> int:
    """Open without waiting: a named pipe would wait for its writer."""
    return os.open(path, flags | os.O_NONBLOCK)


def is_token(line: bytes) -> bool:
    """Whether a line of the file is a token; else it is empty or a comment."""
    return bool(line.strip()) and not line.lstrip().startswith(b"#")


def parse_token(path: str, number: int, line: bytes) -> TokenLine:
    """Return the token of a line. Raises BadConfig, without the secret in its text."""
    where = f"--token-file {path}, line {number}"
    try:
        return parse_line(line.decode())
    except UnicodeDecodeError:
        raise BadConfig(f"{where}: malformed (expected UTF-8)") from None
    except BadCommand as error:
        raise BadConfig(f"{where}: {error.detail}") from None


class Proof:
    """The fid of a Tauth: the user that it names, and whether a secret or an answer has proved it."""

    def __init__(self, tokens: Tokens, uname: str, n_uname: int, where: str = "") -> None:
        self._tokens, self._uname, self._n_uname, self._where = tokens, uname, n_uname, where
        self.grant: Grant | None = None  # once proved
        self._nonce = ""  # of the challenge that was read, for one answer
        self._shown = b""  # data for reads: the challenge, then the server's proof

    def read(self, count: int, offset: int) -> bytes:
        """Return the challenge; after a correct answer, the server's proof."""
        if self.grant is None and not self._nonce:
            self._nonce = challenge.new_nonce()
            self._shown = challenge.line(self._nonce)
        return self._shown[offset : offset + count]

    def write(self, data: bytes) -> int:
        """Check the secret, or the answer to the challenge, whole; a newline may follow. Raises Denied, TooLong,
        BadRequest, or NotAnswered, which changes nothing."""
        if self.grant is not None:
            raise BadRequest("token already written")
        if len(data) > limits.TOKEN_BYTES + 1:
            raise TooLong(f"token of {len(data)} bytes (expected at most {limits.TOKEN_BYTES})")
        nonce, shown, self._nonce, self._shown = self._nonce, self._shown, "", b""
        if not challenge.is_answer(data):
            grant = self._tokens.user(data.rstrip(b"\r\n"), self._where)
        elif not nonce:
            raise BadRequest("answer to no challenge (expected a read before it)")
        else:
            answer = challenge.parse_answer(data)
            grant, proof = self._tokens.user_of_answer(answer, nonce, self._uname, self._where)
            self._shown = challenge.line(proof)
        try:
            known = grant is not None and identity.is_named(grant.uid, self._uname, self._n_uname)
        except NotAnswered:  # only for a correct token: no guess is tried twice with a challenge
            self._nonce, self._shown = nonce, shown
            raise
        if not known:
            raise Denied("unknown token" + (f" for user {self._uname!r}" if self._uname else ""))
        self.grant = grant
        return len(data)

    def user(self, uname: str, n_uname: int) -> Grant:
        """Return the grant for an attach with this fid. Raises Denied."""
        if self.grant is None:
            raise Denied("no token written to the fid of Tauth")
        if (uname, n_uname) != (self._uname, self._n_uname):
            raise Denied("Tattach: another user than in its Tauth")
        return self.grant
