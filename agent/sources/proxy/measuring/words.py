"""Short texts from the outside, kept only where they can be shown and stored."""

from agent.sources.proxy.exchange import RawHeaders

MAX_WORD_LENGTH = 256


def word(value: object) -> str | None:
    """The value where it is a printable text of bounded length, else None."""
    if isinstance(value, str) and 0 < len(value) <= MAX_WORD_LENGTH and value.isprintable():
        return value
    return None


def header(headers: RawHeaders, wanted: bytes) -> bytes | None:
    """The first value of a header, None where it is not there."""
    return next((value for name, value in headers if name == wanted), None)


def header_word(headers: RawHeaders, wanted: bytes) -> str | None:
    """The first value of a header as a word, None where it is not there or is none."""
    try:
        return word((header(headers, wanted) or b"").decode().strip())
    except UnicodeDecodeError:
        return None
