"""Single values as operators write them: durations, addresses, URLs."""

import re
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

_DURATION_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_DURATION = re.compile(r"^(\d+(?:\.\d+)?)([smhdw])$")


def duration_s(value: object) -> float:
    """Seconds of a duration such as `30d`, `12h`, `5m` or `1.5s`; ValueError for anything else."""
    found = _DURATION.match(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"{value!r} is no duration; write a number and s, m, h, d or w, as in 30d")
    return float(found[1]) * _DURATION_UNITS_S[found[2]]


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{value!r} is no address; write host:port, as in 127.0.0.1:4317")
    return value


def _http_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{value!r} is no URL of a server; write http://host:port")
    return value.rstrip("/")


def _otlp_url(value: str) -> str:
    parts = urlsplit(value)
    if parts.scheme not in ("http", "https", "grpc") or not parts.hostname:
        raise ValueError(
            f"{value!r} is no OTLP endpoint; write http://host:4318 or grpc://host:4317"
        )
    return value.rstrip("/")


Duration = Annotated[float, BeforeValidator(duration_s), Field(gt=0)]
Address = Annotated[str, AfterValidator(_address)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
OtlpUrl = Annotated[str, AfterValidator(_otlp_url)]
