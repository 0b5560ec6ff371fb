"""The library: publish, subscribe and consume, by 9P, a ring or an embedded engine (docs/reference/python.md)."""

from mqfs.client.callbacks import LATER, Registration, Worker
from mqfs.client.client import Client, connect, open
from mqfs.client.delivery import Claim, Claims
from mqfs.client.group import Group
from mqfs.client.info import Consumer, ConsumerInfo, ScheduleInfo, Settings, Singles, Stats, StreamStats
from mqfs.client.large import BodyWriter
from mqfs.client.message import Message, Receipt
from mqfs.client.publisher import Outgoing
from mqfs.client.queue import Queue
from mqfs.client.types import Subscription
from mqfs.syntax.names import escape, unescape

__all__ = [
    "LATER",
    "BodyWriter",
    "Claim",
    "Claims",
    "Client",
    "Consumer",
    "ConsumerInfo",
    "Group",
    "Message",
    "Outgoing",
    "Queue",
    "Receipt",
    "Registration",
    "ScheduleInfo",
    "Settings",
    "Singles",
    "Stats",
    "StreamStats",
    "Subscription",
    "Worker",
    "connect",
    "escape",
    "open",
    "unescape",
]
