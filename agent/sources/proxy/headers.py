"""What a proxy may pass on of a head, and what it says of itself."""

from collections.abc import Iterable, Sequence

from agent.sources.proxy.exchange import RawHeaders

HeaderLines = list[tuple[bytes, bytes]]

# RFC 9110 7.6.1, and the older names that RFC 7230 and 2616 listed.
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
# What of a request is not for its engine, or not as it stands: the proxy names the host and frames
# the body itself, has answered an expectation by reading, and adds to what is told of the client.
_READ_BY_PROXY = _HOP_BY_HOP | {
    b"host",
    b"content-length",
    b"expect",
    b"x-forwarded-for",
    b"x-forwarded-proto",
    b"x-forwarded-host",
}


def values(headers: RawHeaders, wanted: bytes) -> list[bytes]:
    """The values of all lines of one name, which is in lower case."""
    return [value for name, value in headers if name == wanted]


def for_client(status: int, headers: RawHeaders) -> HeaderLines:
    """The lines of an engine's answer that its client is to get."""
    dropped = _HOP_BY_HOP
    if connection := values(headers, b"connection"):
        dropped = dropped.union(_tokens(connection))
    if status in (204, 304):
        # Such an answer has no body, whatever length it names, and the server would wait for one.
        dropped |= {b"content-length"}
    return [line for line in headers if line[0] not in dropped]


def at_proxy(lines: HeaderLines, engine: bytes, proxy: bytes) -> HeaderLines:
    """The lines with redirects that lead to the engine leading to the proxy; both are origins.

    An engine makes them of the host that it was asked for, and the client asked another one.
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
    """The comma-separated words of a header, in lower case."""
    return [token.strip().lower() for value in lines for token in value.split(b",")]


class RequestHead:
    """A request's header lines, parted into those that an engine gets and those for the proxy.

    `upgrades` are the protocols to which the client would change, in lower case;
    `declared_bytes` is the length of the body, None where the client names none.
    """

    __slots__ = ("_end_to_end", "_read", "declared_bytes", "upgrades")

    def __init__(self, headers: RawHeaders) -> None:
        # One pass, because all of this is on the way of the first token.
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
            self._heed(_tokens(connection))

    @property
    def host(self) -> bytes | None:
        """The host that the client asked for."""
        return next(iter(self._read.get(b"host", ())), None)

    def _heed(self, connection: Sequence[bytes]) -> None:
        """Drop what the client says is for the next hop only."""
        if b"upgrade" in connection:
            self.upgrades = _tokens(self._read.get(b"upgrade", ()))
        self._end_to_end = [line for line in self._end_to_end if line[0] not in connection]
        for name in connection:
            if name.startswith(b"x-forwarded-"):
                self._read.pop(name, None)

    def for_engine(self, put: RawHeaders, client: str | None, scheme: str) -> HeaderLines:
        """The lines for the engine; those of `put` stand in place of any of their name.

        The client's address is added to those that proxies before this one named; the scheme and
        the host that they told are kept, for they saw what the first client asked for. The host
        and the frame of the body are left to the caller.
        """
        lines = self._end_to_end
        if put:
            replaced = {name for name, _ in put}
            lines = [line for line in lines if line[0] not in replaced]
        read = self._read
        chain = read.get(b"x-forwarded-for", [])
        if client is not None:
            chain = [*chain, client.encode()]
        hosts = read.get(b"x-forwarded-host") or read.get(b"host") or ()
        schemes = read.get(b"x-forwarded-proto") or (scheme.encode(),)
        told = (
            (b"x-forwarded-for", b", ".join(chain)),
            (b"x-forwarded-proto", b", ".join(schemes)),
            (b"x-forwarded-host", b", ".join(hosts)),
        )
        return [*lines, *put, *(line for line in told if line[1])]
