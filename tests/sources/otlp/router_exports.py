"""Spans of llm-d's routers, composed from its published source; none was recorded.

github.com/llm-d/llm-d-router, commit ebab687927f5331c1b39defcb579a07951bce56c: the sidecar's spans
from `pkg/sidecar/proxy/proxy_helpers.go`, `chat_completions.go` and `connector_nixlv2.go`, those of
the endpoint picker from `pkg/epp/handlers/server.go` and `pkg/epp/requestcontrol/director.go`.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.proto.trace.v1.trace_pb2 import Status as SpanStatus

from tests.sources.otlp.exports import Attributes, export, span

SIDECAR: Attributes = {"service.name": "llm-d-disagg-sidecar", "service.version": "v0.9.0"}
PICKER: Attributes = {"service.name": "llm-d-epp", "service.version": "v0.9.0"}
OTELHTTP = "go.opentelemetry.io/contrib/instrumentation/net/http/otelhttp"
SIDECAR_SCOPE = "llm-d-router/pkg/sidecar/proxy"
PICKER_SCOPE = "llm-d-router/pkg/epp/requestcontrol"
CHAT = "/v1/chat/completions"
CONNECTOR = {"llm_d.pd_proxy.connector": "nixlv2"}


def server_span(http_status: int | None = 200, *, path: str = CHAT, **fields: Any) -> Span:
    """The span of the sidecar's server. A response that broke off has no status."""
    attributes: dict[str, Any] = {
        "http.request.method": "POST",
        "url.path": path,
        "url.scheme": "http",
        "server.address": "10.0.0.2",
        "network.protocol.version": "1.1",
    }
    if http_status is not None:
        attributes["http.response.status_code"] = http_status
    failed = http_status is not None and http_status >= 500
    name = f"llm_d.pd_proxy.POST {path}"
    return span(attributes, failed=failed, **({"name": name} | fields))


def inner_span(name: str = "forward_request", **fields: Any) -> Span:
    """The sidecar's handler inside of it: the same request, and also a server."""
    used = {"llm_d.pd_proxy.disaggregation_used": True, "llm_d.pd_proxy.request_path": CHAT}
    return span({**CONNECTOR, **used}, **({"name": name} | fields))


def prefill_span(**fields: Any) -> Span:
    took = {"llm_d.pd_proxy.prefill.duration_ms": 520.0, "llm_d.pd_proxy.prefill.status_code": 200}
    given: dict[str, Any] = {"name": "prefill", "kind": Span.SPAN_KIND_INTERNAL} | fields
    return span({**CONNECTOR, **took}, **given)


def decode_span(**fields: Any) -> Span:
    """Its `true_ttft_ms` is the time until decode starts."""
    took: Mapping[str, Any] = {
        "llm_d.pd_proxy.true_ttft_ms": 545.0,
        "llm_d.pd_proxy.total_duration_ms": 2550.0,
        "llm_d.pd_proxy.decode.streaming": True,
    }
    given: dict[str, Any] = {"name": "decode", "kind": Span.SPAN_KIND_INTERNAL} | fields
    return span({**CONNECTOR, **took}, **given)


def refused_span(code: str = "ResourceExhausted", **fields: Any) -> Span:
    """The picker's span of a request that it refuses."""
    message = f"inference error: {code} - no capacity"
    status = SpanStatus(code=SpanStatus.STATUS_CODE_ERROR, message=message)
    given: dict[str, Any] = {"name": "gateway.request_orchestration", "status": status} | fields
    return span({"target_model": "llama", "request_prio": 0}, **given)


def of_sidecar(*spans: Span) -> ExportTraceServiceRequest:
    return export(*spans, resource=SIDECAR, scope=OTELHTTP)


def of_handler(*spans: Span) -> ExportTraceServiceRequest:
    return export(*spans, resource=SIDECAR, scope=SIDECAR_SCOPE)


def of_picker(*spans: Span) -> ExportTraceServiceRequest:
    return export(*spans, resource=PICKER, scope=PICKER_SCOPE)
