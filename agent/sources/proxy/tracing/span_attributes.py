"""The attributes of a request's span, by the conventions for HTTP servers and for GenAI.

Names: open-telemetry/semantic-conventions, docs/http/http-spans.md (stable), and
open-telemetry/semantic-conventions-genai, docs/gen-ai/gen-ai-spans.md (development, 2026).
Attributes outside the conventions start with `goodput.`. No text of prompts or responses, no query
and no address of a client.
"""

from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from agent.records.request import RequestRecord, Status
from agent.sources.proxy.exchange import RawHeaders
from agent.sources.proxy.measuring.api_protocols import PROTOCOLS

Value = str | float | int | bool | tuple[str, ...]

# The version of the conventions.
SCHEMA_URL = "https://opentelemetry.io/schemas/1.44.0"

# The conventions do not list `vllm`, and allow other values.
_PROVIDER = "vllm"

_UNKNOWN_OPERATION = "generate_content"

# What the client gets from the proxy itself if the engine gave no response.
_OWN_RESPONSES = {"unreachable": 502, "timeout": 504}
_SCHEMES = ("http", "https")

_FROM_RECORD: Mapping[str, Callable[[RequestRecord], Value | None]] = {
    "gen_ai.request.model": lambda record: record.model,
    "gen_ai.request.id": lambda record: record.request_id,
    "gen_ai.usage.input_tokens": lambda record: record.input_tokens,
    "gen_ai.usage.output_tokens": lambda record: record.output_tokens,
    "gen_ai.usage.cache_read.input_tokens": lambda record: record.cached_tokens,
    "gen_ai.usage.reasoning.output_tokens": lambda record: record.reasoning_tokens,
    "gen_ai.response.id": lambda record: record.proxied and record.proxied.response_id,
    "gen_ai.response.finish_reasons": lambda record: _reasons(record.finish_reason),
    "gen_ai.response.time_to_first_chunk": lambda record: record.ttft_s,
    "gen_ai.latency.time_to_first_token": lambda record: record.ttft_s,
    "gen_ai.latency.e2e": lambda record: record.e2e_s,
    "http.request.method": lambda record: "POST",
    "http.response.status_code": lambda record: _status_code(record),
    # Every measured path is one route.
    "http.route": lambda record: record.route,
    "url.path": lambda record: record.route,
    "error.type": lambda record: error_type(record),
    "goodput.engine": lambda record: record.engine,
    "goodput.tenant": lambda record: record.tenant,
    "goodput.status": lambda record: record.status.value,
    "goodput.time_per_output_token_s": lambda record: record.tpot_s,
    "goodput.max_gap_s": lambda record: record.max_gap_s,
    "gen_ai.request.stream": lambda record: record.proxied and record.proxied.streamed,
    "gen_ai.request.choice.count": lambda record: _several(
        record.proxied and record.proxied.choices
    ),
    "goodput.time_to_first_byte_s": lambda record: record.proxied and record.proxied.first_byte_s,
    "http.request.body.size": lambda record: record.proxied and record.proxied.input_bytes,
    "http.response.body.size": lambda record: record.proxied and record.proxied.output_bytes,
}


def attributes_of(record: RequestRecord, response_model: str | None) -> dict[str, Value]:
    """Return the known attributes of a request; `response_model` is the model in the response."""
    known: dict[str, Value] = {
        "gen_ai.operation.name": operation(record.route),
        "gen_ai.provider.name": _PROVIDER,
    }
    for name, read in _FROM_RECORD.items():
        value = read(record)
        if value is not None:
            known[name] = value
    if response_model is not None:
        known["gen_ai.response.model"] = response_model
    return known


def server_attributes(headers: RawHeaders) -> dict[str, Value]:
    """Return the scheme, the host and the port that the client used, as far as headers show."""
    sent = dict(reversed(headers))
    scheme = _first(sent.get(b"x-forwarded-proto")).lower()
    known: dict[str, Value] = {"url.scheme": scheme if scheme in _SCHEMES else "http"}
    try:
        host = urlsplit(f"//{_first(sent.get(b'x-forwarded-host') or sent.get(b'host'))}")
        address, port = host.hostname, host.port
    except ValueError:
        return known
    if address:
        known["server.address"] = address
        if port is not None:
            known["server.port"] = port
    return known


def _first(value: bytes | None) -> str:
    """The first member of a header; every proxy adds one behind it."""
    return (value or b"").decode("latin-1").split(",")[0].strip()


def operation(route: str | None) -> str:
    """Return the name of a route's operation in the conventions."""
    protocol = PROTOCOLS.get(route or "")
    return _UNKNOWN_OPERATION if protocol is None else protocol.operation


def error_type(record: RequestRecord) -> str | None:
    """Return the status code of a response 5xx, else a short code; None without an error.

    By the conventions a response 3xx or 4xx is not an error of the server, and a client that leaves
    is one: it did not get the response whole.
    """
    code = record.http_status
    if code is not None and code >= 300:
        return str(code) if code >= 500 else None
    if record.status is Status.OK:
        return None
    return (record.proxied and record.proxied.error) or record.status.value


def _status_code(record: RequestRecord) -> int | None:
    error = record.proxied and record.proxied.error
    own = _OWN_RESPONSES.get(error) if error else None
    return own if record.http_status is None else record.http_status


def _several(choices: int | None) -> int | None:
    return None if choices == 1 else choices


def _reasons(finish_reason: str | None) -> tuple[str, ...] | None:
    return None if finish_reason is None else tuple(finish_reason.split(","))
