"""Types of single settings: durations, addresses, URLs, names from a list; and their section."""

import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer

from agent.catalog.time_units import DAY_S, HOUR_S, MINUTE_S


class Section(BaseModel):
    """A section of the settings: immutable, and unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


_DURATION_UNITS_S = {"s": 1, "m": MINUTE_S, "h": HOUR_S, "d": DAY_S, "w": 7 * DAY_S}
DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhdw])")

# A hundred years: older times do not fit into a database's calendar.
MAX_DURATION_S = 100 * 365 * DAY_S

# Linux's sockaddr_un has 108, with the NUL.
_SOCKET_PATH_BYTES = 107

_SHARED_DATABASES = ("postgresql", "postgres", "postgresql+psycopg", "clickhousedb")

# From the colon after the user: a password may contain any character.
_URL_PASSWORD = re.compile(r"(://[^:@/]*:).*")
_PASSWORD = re.compile(r"(password=)[^&\s'\"]+")

_LAST_PORT = 65_535
_DIGITS = re.compile(r"[0-9]{1,5}")
# Of a database's URL without user and password. A number of IPv6 ends with a bracket.
_DATABASE_PORT = re.compile(r"[^/?]*:([^/?\]]*)(?:[/?].*)?", re.DOTALL)

_LAST_GPU = 9999

_MOST_SHOWN = 120


def duration_s(value: object) -> float:
    """Seconds of a duration such as `30d`, `12h`, `5m` or `1.5s`; raises ValueError."""
    found = DURATION.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise ValueError(
            f"{shown(value)} is not a duration; write a number and s, m, h, d or w, as in 30d"
        )
    return float(found[1]) * _DURATION_UNITS_S[found[2]]


def duration_text(length_s: float) -> str:
    """A duration in the format of the settings file, in the longest unit that divides it."""
    for unit in "dhm":
        count, rest = divmod(length_s, _DURATION_UNITS_S[unit])
        if count and not rest:
            return f"{count:.0f}{unit}"
    return f"{Decimal(str(length_s)).normalize():f}s"


def masked(text: str) -> str:
    """The text with the passwords of its URLs replaced by ***."""
    return _PASSWORD.sub(r"\1***", "\n".join(map(_without_password, text.split("\n"))))


def _without_password(line: str) -> str:
    before, at, host = line.rpartition("@")
    return _URL_PASSWORD.sub(r"\1***", before) + at + host


def shown(value: object) -> str:
    """A value for a message: cut, without passwords, and without what a list or mapping holds."""
    if isinstance(value, (Mapping, list, tuple)):
        return "a mapping" if isinstance(value, Mapping) else "a list"
    text = masked(repr(value))
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}... ({len(text)} characters)"


def did_you_mean(given: str, names: Iterable[str]) -> str:
    """The end of a sentence, with the names that `given` begins or is like; empty without any."""
    plain = {name.casefold(): name for name in names}
    wanted = given.casefold()
    whole = [name for each, name in plain.items() if wanted and each.startswith(f"{wanted}-")]
    found = whole or [plain[each] for each in get_close_matches(wanted, plain, n=3, cutoff=0.7)]
    if not found:
        return ""
    *most, last = found
    return f"; did you mean {', '.join(most)} or {last}?" if most else f"; did you mean {last}?"


def known(names: Iterable[str]) -> AfterValidator:
    """A check that a value is one of these names."""
    listed = tuple(names)

    def check(value: str) -> str:
        if value not in listed:
            close = did_you_mean(value, listed)
            raise ValueError(f"{shown(value)} is not known; known are {', '.join(listed)}{close}")
        return value

    return AfterValidator(check)


def _gpu(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError(f"{shown(value)} is not a GPU; write its index or its UUID")
    if isinstance(value, int) and not 0 <= value <= _LAST_GPU:
        raise ValueError(f"{shown(value)} is not a GPU; indexes are from 0 to {_LAST_GPU}")
    return value


def _address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not (_is_port(port) or port == "0"):
        raise ValueError(f"{shown(value)} is not an address; write host:port, as in 127.0.0.1:4317")
    return value


def _is_port(text: str) -> bool:
    return _DIGITS.fullmatch(text) is not None and 0 < int(text) <= _LAST_PORT


def _server(value: str, schemes: Iterable[str]) -> SplitResult | None:
    """The parts of a URL; None unless it has a host and one of these schemes."""
    if " " in value or not value.isprintable():
        return None
    try:
        parts = urlsplit(value)
        found = parts.scheme in schemes and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return None
    return parts if found else None


def _http_url(value: str) -> str:
    if _server(value, ("http", "https")) is None:
        raise ValueError(f"{shown(value)} is not the URL of a server; write http://host:port")
    return value.rstrip("/")


def _trace_url(value: str) -> str:
    if urlsplit(value).scheme not in ("http", "https") or "{trace_id}" not in value:
        raise ValueError(
            f"{shown(value)} is not the address of a trace; "
            "write https://jaeger.example/trace/{trace_id}"
        )
    return value


def _otlp_url(value: str) -> str:
    parts = _server(value, ("http", "https", "grpc"))
    if parts is None or (parts.scheme == "grpc" and parts.port is None):
        raise ValueError(
            f"{shown(value)} is not an OTLP endpoint; write http://host:4318 or grpc://host:4317"
        )
    return value.rstrip("/")


def _sqlite_file(value: str) -> str:
    # SQLAlchemy and SQLite read more than a path into these.
    if "://" in value or "?" in value or value.startswith(("file:", ":memory:")):
        raise ValueError(
            f"{shown(value)} is not the path of a SQLite file; write a path without ?, as in "
            "/var/lib/goodput-agent/goodput.db"
        )
    return value


def _database_url(value: str) -> str:
    if value.partition("://")[0] not in _SHARED_DATABASES or "://" not in value:
        raise ValueError(
            f"{shown(value)} is not a supported shared database; write "
            "postgresql://user:password@host/database or "
            "clickhousedb://user:password@host:8123/database (a SQLite file is storage.file)"
        )
    port = _DATABASE_PORT.fullmatch(value.partition("://")[2].rpartition("@")[2])
    if port is not None and port[1] and not _is_port(port[1]):
        raise ValueError(f"{shown(value)} has a port that is not from 1 to {_LAST_PORT}")
    return value


def _socket_path(value: Path) -> Path:
    if not value.is_absolute() or len(str(value).encode()) > _SOCKET_PATH_BYTES:
        raise ValueError(
            f"{shown(str(value))} is not the path of a socket; write an absolute one of at most "
            f"{_SOCKET_PATH_BYTES} bytes, such as /run/goodput-agent/vllm.sock"
        )
    return value


def _agent_socket(value: str) -> str:
    if value not in ("auto", "none"):
        _socket_path(Path(value))
    return value


def _at_most(largest: float, value: Any) -> Any:
    if abs(value) > largest:
        raise ValueError(f"{shown(value)} is too large; the largest number here is {largest:g}")
    return value


def host_and_port(address: str) -> tuple[str, int]:
    """The host and the port of an Address."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


Duration = Annotated[
    float,
    BeforeValidator(duration_s),
    Field(gt=0, le=MAX_DURATION_S),
    PlainSerializer(duration_text, when_used="json"),
]
Gpu = Annotated[int | str, BeforeValidator(_gpu)]
SocketPath = Annotated[Path, AfterValidator(_socket_path)]
AgentSocket = Annotated[str, AfterValidator(_agent_socket)]
Address = Annotated[str, AfterValidator(_address)]
HttpUrl = Annotated[str, AfterValidator(_http_url)]
TraceUrl = Annotated[str, AfterValidator(_trace_url)]
OtlpUrl = Annotated[str, AfterValidator(_otlp_url)]
SqliteFile = Annotated[str, Field(min_length=1), AfterValidator(_sqlite_file)]
DatabaseUrl = Annotated[str, AfterValidator(_database_url)]

# Strict: YAML's `yes` is not 1, and a text is not a number. Limited, so that no product of some of
# them is infinite, and a database has a type for them.
Number = Annotated[
    float, Field(strict=True, allow_inf_nan=False), AfterValidator(partial(_at_most, 1e15))
]
WholeNumber = Annotated[int, Field(strict=True), AfterValidator(partial(_at_most, 2**63 - 1))]
