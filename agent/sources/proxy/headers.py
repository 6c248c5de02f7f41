"""Header rules of the proxy: what is relayed, dropped, and added."""

from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime

from agent.sources.proxy.exchange import RawHeaders

HeaderLines = list[tuple[bytes, bytes]]

# RFC 9110 7.6.1, and the older names in RFC 7230 and 2616.
_HOP_BY_HOP = frozenset(
    {
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authentication-info",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    }
)
# Request headers that are not relayed unchanged. The proxy sets the host and the body's framing,
# has answered `expect` by reading the body, and extends the x-forwarded lines.
_READ_BY_PROXY = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"x-forwarded-host",
}


def for_client(status: int, headers: RawHeaders) -> HeaderLines:
    """Return the lines of an engine's response that the client gets."""
    kept, dropped = [], set[bytes]()
    for line in headers:
        if line[0] not in _HOP_BY_HOP:
            kept.append(line)
        elif line[0] == b"connection":
            dropped.update(_tokens([line[1]]))
    if status in (204, 304):
        # These responses have no body; the client would wait for one of the declared length.
        dropped.add(b"content-length")
    return [line for line in kept if line[0] not in dropped] if dropped else kept


def with_added(lines: RawHeaders, added: RawHeaders) -> RawHeaders:
    """Add to a response's lines those whose names it does not have."""
    if not added:
        return lines
    present = {name for name, _ in lines}
    return [*lines, *(line for line in added if line[0] not in present)]


def retry_after(headers: RawHeaders, now: float) -> float | None:
    """Return the seconds that an engine asks to wait, given as such or as a date; None without."""
    text = next((value.decode("latin-1") for name, value in headers if name == b"retry-after"), "")
    if text.strip().isdecimal():
        return float(text)
    try:
        return max(0.0, parsedate_to_datetime(text).timestamp() - now)
    except (ValueError, OverflowError):
        return None


def redirect_to_proxy(lines: HeaderLines, engine: bytes, proxy: bytes) -> HeaderLines:
    """Replace the engine's origin by the proxy's in `location`.

    An engine builds redirects from its own host, and the client sent its request to another one.
    """
    if not any(name == b"location" for name, _ in lines):
        return lines
    return [
        (name, proxy + value[len(engine) :])
        if name == b"location" and (value + b"/").startswith(engine + b"/")
        else (name, value)
        for name, value in lines
    ]


def _tokens(lines: Iterable[bytes]) -> list[bytes]:
    """Return the comma-separated tokens of a header, in lower case."""
    return [token.strip().lower() for value in lines for token in value.split(b",")]


class RequestHead:
    """A request's header lines, split into lines for the engine and lines for the proxy.

    `upgrades` are the protocols that the client offers to switch to, in lower case;
    `declared_bytes` is the length of the body, None if the client declares none.
    """

    __slots__ = ("_end_to_end", "_read", "declared_bytes", "upgrades")

    def __init__(self, headers: RawHeaders) -> None:
        # One pass over the lines: this delays the first token.
        self._end_to_end: HeaderLines = []
        self._read: dict[bytes, list[bytes]] = {}
        for line in headers:
            if line[0] in _READ_BY_PROXY:
                self._read.setdefault(line[0], []).append(line[1])
            else:
                self._end_to_end.append(line)
        self.declared_bytes: int | None = None
        if lengths := self._read.get(b"content-length"):
            self.declared_bytes = int(lengths[0])
        self.upgrades: Sequence[bytes] = ()
        if connection := self._read.get(b"connection"):
            self._drop_hop_by_hop(_tokens(connection))

    @property
    def host(self) -> bytes | None:
        """The host in the client's request."""
        return next(iter(self._read.get(b"host", ())), None)

    def _drop_hop_by_hop(self, connection: Sequence[bytes]) -> None:
        """Drop the lines that the client's `connection` header limits to one hop."""
        if b"upgrade" in connection:
            self.upgrades = _tokens(self._read.get(b"upgrade", ()))
        self._end_to_end = [line for line in self._end_to_end if line[0] not in connection]
        for name in connection:
            if name.startswith(b"x-forwarded-"):
                self._read.pop(name, None)

    @property
    def awaits_continue(self) -> bool:
        """Whether the client sends the body only after a 100 Continue."""
        return any(value.lower() == b"100-continue" for value in self._read.get(b"expect", ()))

    def for_engine(self, replacements: RawHeaders, client: str | None, scheme: str) -> list[bytes]:
        """Return the lines for the engine in parts, without the host and the body's framing.

        `replacements` replace the lines of their names, those without a value by none. The client's
        address is appended to `x-forwarded-for`; a scheme and a host set by an earlier proxy are
        kept.
        """
        parts: list[bytes] = []
        replaced = [name for name, _ in replacements]
        for name, value in self._end_to_end:
            if name not in replaced:
                parts += (name, b": ", value, b"\r\n")
        for name, value in replacements:
            if value:
                parts += (name, b": ", value, b"\r\n")
        read = self._read
        chain = read.get(b"x-forwarded-for", [])
        if client is not None:
            chain = [*chain, client.encode()]
        schemes = read.get(b"x-forwarded-proto") or (scheme.encode(),)
        hosts = read.get(b"x-forwarded-host") or read.get(b"host") or ()
        if for_ := b", ".join(chain):
            parts += (b"x-forwarded-for: ", for_, b"\r\n")
        parts += (b"x-forwarded-proto: ", b", ".join(schemes), b"\r\n")
        if host := b", ".join(hosts):
            parts += (b"x-forwarded-host: ", host, b"\r\n")
        return parts
