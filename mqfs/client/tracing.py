"""Spans of OpenTelemetry for messages, in the semantic conventions of messaging. Needs the package opentelemetry-api.

    from mqfs import tracing
    with tracing.send("shop", "orders") as headers:
        group.publish("orders", b"3 lamps", headers=headers)

    for claim in group.consume("mail"):
        with tracing.process("shop", claim, consumer="mail"):
            ...                                # this work, and its publishes, belong to the sender's trace

The library itself makes no spans, so programs without them pay nothing. A message belongs to a trace by its headers
`traceparent` and `tracestate`, which `mq put`, `mq-work` and HTTP pass on, too.
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
    """Make a span around a publish, for a thread or a task.

    Args:
        group: The path of the group, as in `Group.path`.
        stream: The stream to publish to.

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
    """Make a span around the processing of a message. Its parent is the sender's span, if the message names one.

    Args:
        group: The path of the group, as in `Group.path`.
        message: The message or claim.
        consumer: The consumer that claimed it. Empty: none, the message was read.

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
