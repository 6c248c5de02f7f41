"""What the headers of a request tell of who asks, and what is asked to be measured against."""

from collections.abc import Callable
from hashlib import sha256
from math import isfinite

from agent.sources.proxy.measuring.words import Headers, header_word

# Keeps the digest apart from any other of the same key elsewhere.
_KEY_DOMAIN = b"goodput-agent tenant of API key\0"
_KEY_DIGITS = 12


def request_id_of(headers: Headers, span_id: str) -> str:
    """The client's own id of the request, that of its span where it has none that can be kept."""
    return header_word(headers, b"x-request-id") or span_id


def tenant_of(headers: Headers, tenant_header: bytes | None) -> str | None:
    """The tenant by the header that names it, else by a digest of the API key, else None."""
    named = header_word(headers, tenant_header) if tenant_header else None
    if named:
        return named
    key = _api_key(headers)
    return f"key-{sha256(_KEY_DOMAIN + key).hexdigest()[:_KEY_DIGITS]}" if key else None


def _api_key(headers: Headers) -> bytes | None:
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    if scheme.lower() == b"bearer" and token.strip():
        return token.strip()
    return headers.get(b"x-api-key", b"").strip() or None


def limit_s(headers: Headers, name: bytes, on_failure: Callable[[str], None]) -> float | None:
    """The limit in seconds that a header sets in milliseconds, None where it sets none.

    One that is no positive finite number is counted as `slo_header`.
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
    on_failure("slo_header")
    return None
