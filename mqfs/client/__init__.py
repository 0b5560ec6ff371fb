"""The library: publish, subscribe, consume, over 9P or with the engine in this process. See doc/library.md."""

from mqfs.client.client import Client, connect, open
from mqfs.client.consuming import Claim, Claims
from mqfs.client.group import Group
from mqfs.client.listening import Registration
from mqfs.client.publishing import Outgoing
from mqfs.client.reading import Reading
from mqfs.client.working import Worker
from mqfs.types import Message

__all__ = [
    "Claim",
    "Claims",
    "Client",
    "Group",
    "Message",
    "Outgoing",
    "Reading",
    "Registration",
    "Worker",
    "connect",
    "open",
]
