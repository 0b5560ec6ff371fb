"""The library: publish, subscribe and consume, by 9P, a ring or an embedded engine (docs/reference/python.md)."""

from mqfs.client.callbacks import LATER, Registration, Worker
from mqfs.client.client import Client, connect, open
from mqfs.client.delivery import Claim, Claims
from mqfs.client.group import Group
from mqfs.client.message import Kept, Message
from mqfs.client.outgoing import Outgoing
from mqfs.client.types import Subscription
from mqfs.syntax.escape import escape, unescape

__all__ = [
    "LATER",
    "Claim",
    "Claims",
    "Client",
    "Group",
    "Kept",
    "Message",
    "Outgoing",
    "Registration",
    "Subscription",
    "Worker",
    "connect",
    "escape",
    "open",
    "unescape",
]
