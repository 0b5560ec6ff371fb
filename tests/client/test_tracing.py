"""Spans of OpenTelemetry: of a sender and of who works on the message, in one trace, by whatever way it goes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

import mqfs
from mqfs import tracing

PROVIDER = TracerProvider()
SPANS = InMemorySpanExporter()
PROVIDER.add_span_processor(SimpleSpanProcessor(SPANS))
trace.set_tracer_provider(PROVIDER)


@pytest.fixture
def group() -> Iterator[mqfs.Group]:
    SPANS.clear()
    with mqfs.open(None) as client:
        group = client.group("shop", create=True, settings=mqfs.Settings(replay="all"))
        group.consume("mail", over="orders").close()
        yield group


def finished() -> list[ReadableSpan]:
    return list(SPANS.get_finished_spans())


def test_what_is_done_for_a_message_is_below_its_sender(group: mqfs.Group) -> None:
    with PROVIDER.get_tracer("test").start_as_current_span("request"), tracing.send("shop", "orders") as headers:
        group.publish("orders", b"3 lamps", headers=headers)
    with group.consume("mail") as claims, claims.get(1) as claim, tracing.process("shop", claim, consumer="mail"):
        pass
    sent, request, processed = finished()
    assert sent.parent is not None
    assert processed.parent is not None
    assert sent.parent.span_id == request.context.span_id
    assert processed.parent.span_id == sent.context.span_id
    assert {span.context.trace_id for span in finished()} == {request.context.trace_id}
    assert (sent.name, sent.kind, processed.name, processed.kind) == (
        "publish shop/orders", SpanKind.PRODUCER, "process shop/orders", SpanKind.CONSUMER,
    )  # fmt: skip
    assert dict(processed.attributes or {}) == {
        "messaging.system": "mqfs",
        "messaging.operation.type": "process",
        "messaging.operation.name": "process",
        "messaging.destination.name": "shop/orders",
        "messaging.message.id": str(claim.sequence),
        "messaging.message.body.size": 7,
        "messaging.consumer.group.name": "mail",
    }


def test_a_message_without_a_trace_begins_one_and_a_failure_is_in_it(group: mqfs.Group) -> None:
    group.publish("orders", b"x", headers={"traceparent": "nonsense"})
    (message,) = group.history(pattern="orders")
    with pytest.raises(ZeroDivisionError), tracing.process("", message):
        raise ZeroDivisionError
    (span,) = finished()
    assert (span.parent, span.name, span.status.is_ok) == (None, "process orders", False)
