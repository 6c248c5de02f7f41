"""What the agent reads from HTTP headers: request id, tenant, and latency limits of the client."""

from collections.abc import Mapping
from hashlib import sha256
from math import isfinite

from agent.catalog.reasons import ProxyFailure
from agent.sources.proxy.exchange import OnFailure, RawHeaders
from agent.sources.proxy.measuring.json_values import short_text
from agent.sources.proxy.measuring.request_fields import priority_of

# The first value of each header.
Headers = Mapping[bytes, bytes]

REQUEST_ID = b"x-request-id"
_PRIORITY = b"x-vllm-priority"

# A prefix makes the digest differ from a digest of the same key in another system.
_KEY_DOMAIN = b"goodput-agent tenant of API key\0"
_KEY_DIGITS = 12


def by_name(headers: RawHeaders) -> Headers:
    """Return the headers by name, with the first value of a repeated header."""
    return dict(reversed(headers))


def request_id_of(headers: Headers) -> str | None:
    """Return the client's request id; None if it sent none, or none that is a printable text of at
    most 256 characters."""
    return _header_text(headers, REQUEST_ID)


def tenant_of(headers: Headers, tenant_header: bytes | None) -> str | None:
    """Return the tenant from the configured header, else a digest of the API key, else None."""
    named = _header_text(headers, tenant_header) if tenant_header else None
    if named:
        return named
    key = _api_key(headers)
    return f"key-{sha256(_KEY_DOMAIN + key).hexdigest()[:_KEY_DIGITS]}" if key else None


def client_name(headers: Headers, header: bytes | None) -> str | None:
    """Return the value of a configured header; None without one of at most 256 characters."""
    return _header_text(headers, header) if header else None


def priority_header(headers: Headers) -> int | None:
    """Return the priority of vLLM's own header, which wins over the one in the body."""
    try:
        return priority_of(int(headers[_PRIORITY]))
    except (KeyError, ValueError):
        return None


def limit_s(headers: Headers, name: bytes, on_failure: OnFailure) -> float | None:
    """Return the limit in seconds of a header in milliseconds; None without the header.

    A value that is not a positive finite number is ignored and counted as a failure.
    """
    value = headers.get(name)
    if value is None:
        return None
    try:
        limit_ms = float(value)
    except ValueError:
        limit_ms = 0.0
    if isfinite(limit_ms) and limit_ms > 0:
        return limit_ms / 1000
    on_failure(ProxyFailure.SLO_HEADER)
    return None


def _header_text(headers: Headers, name: bytes) -> str | None:
    value = headers.get(name)
    if value is None:
        return None
    try:
        return short_text(value.decode().strip())
    except UnicodeDecodeError:
        return None


def _api_key(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key", b"").strip() or None
