"""Spans of OpenTelemetry for messages, in the semantic conventions of messaging. Needs the package opentelemetry-api.

    from mqfs import tracing
    with tracing.send("shop", "orders") as headers:
        group.publish("orders", b"3 lamps", headers=headers)

    for claim in group.consume("mail"):
        with tracing.process("shop", claim, consumer="mail"):
            ...                                # what it does, and publishes, belongs to the sender's trace

The library itself does none of this: who wants no spans pays nothing. A message belongs to a trace by its headers
`traceparent` and `tracestate`, which `mq put`, `mq-work` and HTTP have, too.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import trace
from opentelemetry.trace import Span, SpanKind
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from mqfs import __version__
from mqfs.client import Claim, Message

_CONTEXT = TraceContextTextMapPropagator()


def _attributes(operation: str, name: str, path: str) -> dict[str, str | int]:
    return {
        "messaging.system": "mqfs",
        "messaging.operation.type": operation,
        "messaging.operation.name": name,
        "messaging.destination.name": path,
    }


def _path(group: str, stream: str) -> str:
    return f"{group}/{stream}" if group else stream


@contextmanager
def send(group: str, stream: str) -> Iterator[dict[str, str]]:
    """A span around a publish, of a thread or a task.

    Args:
        group: The path of the group, as `Group.path` has it.
        stream: The stream that is published to.

    Yields:
        The headers for the message.
    """
    path = _path(group, stream)
    attributes = _attributes("send", "publish", path)
    tracer = trace.get_tracer("mqfs", __version__)
    with tracer.start_as_current_span(f"publish {path}", kind=SpanKind.PRODUCER, attributes=attributes):
        headers: dict[str, str] = {}
        _CONTEXT.inject(headers)
        yield headers


@contextmanager
def process(group: str, message: Message | Claim, *, consumer: str = "") -> Iterator[Span]:
    """A span around what is done for a message. Its parent is the span that sent it, if the message says so.

    Args:
        group: The path of the group, as `Group.path` has it.
        message: What came.
        consumer: The consumer that gave it. Empty: none, it was read.

    Yields:
        The span.
    """
    path = _path(group, message.stream)
    attributes = _attributes("process", "process", path)
    attributes |= {"messaging.message.id": str(message.sequence), "messaging.message.body.size": len(message.body)}
    if consumer:
        attributes["messaging.consumer.group.name"] = consumer
    context = _CONTEXT.extract(dict(message.headers))
    tracer = trace.get_tracer("mqfs", __version__)
    kind = SpanKind.CONSUMER
    with tracer.start_as_current_span(f"process {path}", context=context, kind=kind, attributes=attributes) as span:
        yield span
