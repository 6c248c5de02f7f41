"""Short texts from the outside, kept only where they can be shown and stored."""

from collections.abc import Mapping

from agent.sources.proxy.exchange import RawHeaders

# The first value of each header.
Headers = Mapping[bytes, bytes]

MAX_WORD_LENGTH = 256


def word(value: object) -> str | None:
    """The value where it is a printable text of bounded length, else None."""
    if isinstance(value, str) and 0 < len(value) <= MAX_WORD_LENGTH and value.isprintable():
        return value
    return None


def by_name(headers: RawHeaders) -> Headers:
    """The headers by their names, the first of several with the same one."""
    return dict(reversed(headers))


def header_word(headers: Headers, wanted: bytes) -> str | None:
    """The value of a header as a word, None where it is not there or is none."""
    value = headers.get(wanted)
    if value is None:
        return None
    try:
        return word(value.decode().strip())
    except UnicodeDecodeError:
        return None
