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
    dropped = _HOP_BY_HOP
    if connection := [value for name, value in headers if name == b"connection"]:
        dropped = dropped.union(_tokens(connection))
    if status in (204, 304):
        # These responses have no body; the server would wait for one of the declared length.
        dropped |= {b"content-length"}
    return [line for line in headers if line[0] not in dropped]


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

    def for_engine(self, replacements: RawHeaders, client: str | None, scheme: str) -> HeaderLines:
        """Return the lines for the engine, without the host and the body's framing.

        `replacements` replace the lines of their names, those without a value by none. The client's
        address is appended to `x-forwarded-for`; a scheme and a host set by an earlier proxy are
        kept.
        """
        lines = self._end_to_end
        if replacements:
            replaced = {name for name, _ in replacements}
            lines = [line for line in lines if line[0] not in replaced]
        read = self._read
        chain = read.get(b"x-forwarded-for", [])
        if client is not None:
            chain = [*chain, client.encode()]
        hosts = read.get(b"x-forwarded-host") or read.get(b"host") or ()
        schemes = read.get(b"x-forwarded-proto") or (scheme.encode(),)
        set_by_proxy = (
            *replacements,
            (b"x-forwarded-for", b", ".join(chain)),
            (b"x-forwarded-proto", b", ".join(schemes)),
            (b"x-forwarded-host", b", ".join(hosts)),
        )
        return [*lines, *(line for line in set_by_proxy if line[1])]
