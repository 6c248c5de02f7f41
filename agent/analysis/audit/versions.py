"""Versions of an engine as numbers that sort."""

import re

VersionKey = tuple[int, ...]

_RELEASE = re.compile(r"v?(\d+(?:\.\d+)*)(.*)")
# Of a version before its release: 0.22.0rc1, 0.22.0.dev7.
_BEFORE = re.compile(r"[.-]?(a|b|rc|dev)")
_NUMBERS = 4


def version_key(version: str | None) -> VersionKey | None:
    """The numbers of a version, of which one before a release sorts below it; None if unknown."""
    found = _RELEASE.fullmatch(version or "")
    if found is None:
        return None
    numbers = [int(part) for part in found[1].split(".")][:_NUMBERS]
    before = -1 if _BEFORE.match(found[2]) else 0
    return (*numbers, *[0] * (_NUMBERS - len(numbers)), before)


def is_older(version: str | None, than: str) -> bool | None:
    """Whether a version comes before another one; None where it is unknown."""
    key, other = version_key(version), version_key(than)
    return None if key is None or other is None else key < other
