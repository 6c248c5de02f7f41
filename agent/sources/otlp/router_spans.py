"""Reads the spans of llm-d's routers that stand for one request: its route and its outcome."""

from typing import NamedTuple

from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from agent.catalog.spans import (
    HTTP_STATUS_KEYS,
    PICKER_ERRORS,
    PICKER_MODEL_KEY,
    PICKER_SPAN_NAME,
    ROUTED_PATHS,
    SIDECAR_SPAN_PREFIX,
)
from agent.records.request import Status, status_of


class RoutedRequest(NamedTuple):
    """What a router knows about a request. `http_status` and the others are None if unknown."""

    status: Status
    http_status: int | None
    route: str | None = None
    model: str | None = None


def routed_request(span: Span) -> RoutedRequest | None:
    """The request of a router's span; None of any other span."""
    if span.name.startswith(SIDECAR_SPAN_PREFIX):
        return _of_sidecar(span)
    if span.name == PICKER_SPAN_NAME and span.status.code == SpanStatus.STATUS_CODE_ERROR:
        return _of_picker(span)
    return None


def _of_sidecar(span: Span) -> RoutedRequest | None:
    route = span.name.removeprefix(SIDECAR_SPAN_PREFIX)
    if span.kind != Span.SPAN_KIND_SERVER or route not in ROUTED_PATHS:
        return None
    http_status = next(
        (pair.value.int_value for pair in span.attributes if pair.key in HTTP_STATUS_KEYS), 0
    )
    # A response that broke off has no status: its client may have left.
    if not 100 <= http_status < 600:
        return RoutedRequest(Status.OK, None, route)
    failed = http_status >= 300
    return RoutedRequest(status_of(http_status) if failed else Status.OK, http_status, route)


def _of_picker(span: Span) -> RoutedRequest:
    model = next(
        (pair.value.string_value for pair in span.attributes if pair.key == PICKER_MODEL_KEY), None
    )
    # A message begins with `inference error: ResourceExhausted - `.
    code = span.status.message.removeprefix("inference error: ").partition(" - ")[0]
    http_status = PICKER_ERRORS.get(code)
    status = Status.ERROR if http_status is None else status_of(http_status)
    return RoutedRequest(status, http_status, model=model or None)
