"""Tokens of tests: secrets, and their lines in a file of tokens."""

from __future__ import annotations

from mqfs.syntax.lines import TokenLine, digest, id_of, print_line


def secret_of(token: str) -> str:
    """Return the secret of a token."""
    return f"mq_{token}_{token:s>43}"


def line_of(user: object, secret: str, scope: str = "admin") -> str:
    return print_line(TokenLine(str(user), id_of(secret.encode()), digest(secret.encode()), scope)) + "\n"


SECRET, OTHER = secret_of("0a0b"), secret_of("0c0d")
