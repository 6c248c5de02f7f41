"""The members of a JSON object with their places in the text, for changes that leave the rest."""

import json
import re
from collections.abc import Mapping
from json.decoder import scanstring  # type: ignore[attr-defined]  # absent from typeshed
from typing import Any, NamedTuple

_SPACES = frozenset(" \t\n\r")
_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Member(NamedTuple):
    """A value of an object, where its name begins, and where its own text begins and ends."""

    value: Any
    name: int
    begin: int
    end: int


def members(text: str) -> dict[str, Member]:
    """The members of the object that the text is, by name.

    ValueError for anything else than one JSON object whose names differ, RecursionError for one
    that is nested too deeply.
    """
    found: dict[str, Member] = {}
    at = _passed(text, _space(text, 0), "{")
    at = _space(text, at)
    if text.startswith("}", at):
        return _ended(text, at + 1, found)
    while True:
        named = at
        name, at = scanstring(text, _passed(text, at, '"'), True)
        begin = _space(text, _passed(text, _space(text, at), ":"))
        value, end = _DECODER.raw_decode(text, begin)
        if name in found:
            raise ValueError(f"the name {name!r} stands twice")
        found[name] = Member(value, named, begin, end)
        at = _space(text, end)
        if text.startswith("}", at):
            return _ended(text, at + 1, found)
        at = _space(text, _passed(text, at, ","))


def with_member(text: str, found: Mapping[str, Member], name: str, value: str) -> str:
    """The object with one value set, which is given as JSON; all else stays as it was written.

    `found` are the members of the text.
    """
    if member := found.get(name):
        return text[: member.begin] + value + text[member.end :]
    begin = text.index("{") + 1
    return f"{text[:begin]}{json.dumps(name)}:{value}{',' if found else ''}{text[begin:]}"


def without_member(text: str, found: Mapping[str, Member], name: str) -> str:
    """The object without one of its members; all else stays as it was written."""
    places = list(found)
    place = places.index(name)
    if place:
        return text[: found[places[place - 1]].end] + text[found[name].end :]
    following = found[places[1]].name if len(places) > 1 else found[name].end
    return text[: found[name].name] + text[following:]


def _space(text: str, at: int) -> int:
    # Mostly there is none.
    if text[at : at + 1] not in _SPACES:
        return at
    match = _SPACE.match(text, at)
    return match.end() if match else at


def _passed(text: str, at: int, expected: str) -> int:
    if not text.startswith(expected, at):
        raise ValueError(f"expected {expected} at character {at}")
    return at + 1


def _ended(text: str, at: int, found: dict[str, Member]) -> dict[str, Member]:
    if _space(text, at) != len(text):
        raise ValueError(f"text after the object at character {at}")
    return found
