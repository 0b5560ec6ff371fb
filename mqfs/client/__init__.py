"""The library: publish, subscribe and consume, by 9P, a ring or an embedded engine (docs/reference/python.md)."""

from mqfs.client.callbacks import Registration
from mqfs.client.client import Client, connect, open
from mqfs.client.delivery import Claim, Claims
from mqfs.client.group import Group
from mqfs.client.outgoing import Outgoing
from mqfs.client.types import Subscription
from mqfs.client.workers import Worker
from mqfs.model import Message

Reading = Subscription  # its name in version 0.1

__all__ = [
    "Claim",
    "Claims",
    "Client",
    "Group",
    "Message",
    "Outgoing",
    "Reading",
    "Registration",
    "Subscription",
    "Worker",
    "connect",
    "open",
]
