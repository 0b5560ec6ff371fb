"""Proving a token to each other without sending it: two nonces, and an HMAC of both by either side.

The key is the SHA-256 of the secret, which is in the server's file of tokens. The server sends

    hmac-sha256 NONCE

The client proves that it knows the secret, and then the server does. So another server at this port learns nothing, and
is detected:

    hmac-sha256 ID NONCE PROOF        ID: of the token; - of a text that is none
    hmac-sha256 PROOF

Nonces and proofs are hexadecimal digits. A relay between the two can still read and change all that follows: TLS
prevents that.
"""

from __future__ import annotations

import hmac
import re
import secrets
from typing import NamedTuple

from mqfs.errors import BadRequest, Denied
from mqfs.syntax.lines import digest, id_of

NAME = "hmac-sha256"
NO_ID = "-"
_NONCE_BYTES = 32
_ANSWER = re.compile(rf"{NAME} ([0-9a-zA-Z]{{1,32}}|-) ([0-9a-f]{{64}}) ([0-9a-f]{{64}})\n?")
_ONE = re.compile(rf"{NAME} ([0-9a-f]{{64}})\n")
CLIENT, SERVER = b"client", b"server"  # the side that proves


class Answer(NamedTuple):
    """The answer of a client. `id`: of its token; empty if the text is not a token."""

    id: str
    nonce: str
    proof: str


def new_nonce() -> str:
    return secrets.token_hex(_NONCE_BYTES)


def prove(key: bytes, side: bytes, server_nonce: str, client_nonce: str, user: str) -> str:
    """Return the proof of one side. `key`: the SHA-256 of the secret; `user`: as named by the Tauth."""
    text = b"\0".join((b"mqfs 9P", side, server_nonce.encode(), client_nonce.encode(), user.encode()))
    return hmac.digest(key, text, "sha256").hex()


def line(*words: str) -> bytes:
    return " ".join((NAME, *words, "")).rstrip().encode() + b"\n"


def is_answer(data: bytes) -> bool:
    """Whether a client wrote an answer, not the secret itself, which has no blanks."""
    return data.startswith(f"{NAME} ".encode())


def parse_answer(data: bytes) -> Answer:
    """Parse a client's answer. Raises BadRequest."""
    found = _ANSWER.fullmatch(data.decode("ascii", "replace"))
    if found is None:
        raise BadRequest(f"malformed answer to the challenge (expected {NAME} ID NONCE PROOF)")
    return Answer("" if found[1] == NO_ID else found[1], found[2], found[3])


class Client:
    """The client's side of one challenge. `answer`: the data to write."""

    def __init__(self, secret: bytes, server_nonce: str, user: str) -> None:
        key, nonce = digest(secret), new_nonce()
        self.answer = line(id_of(secret) or NO_ID, nonce, prove(key, CLIENT, server_nonce, nonce, user))
        self._wanted = prove(key, SERVER, server_nonce, nonce, user)

    def check(self, data: bytes) -> None:
        """Check the server's own proof. Raises Denied."""
        if not hmac.compare_digest(parse_line(data), self._wanted):
            raise Denied("another server: it does not know the token")


def parse_line(data: bytes) -> str:
    """Return the nonce or the proof that a server sent, or "" if it sent none."""
    found = _ONE.fullmatch(data.decode("ascii", "replace"))
    return found[1] if found is not None else ""
