"""Reads YAML as plain values, within bounds, with the line of each value and of each mistake."""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from agent.settings.values import shown

Place = tuple[Hashable, ...]

# Stands for a value that has a problem; it is of no type that a setting has.
UNREAD = object()

# With aliases counted in full: a kilobyte of them can stand for billions.
_MAX_NODES = 100_000
_MAX_DEPTH = 50
# Python refuses a number of more than 4,300 digits, and pydantic one that no float can hold.
_MAX_NUMBER = 100

_PREFIX = "tag:yaml.org,2002:"
_NOT_RESOLVED = (f"{_PREFIX}timestamp", f"{_PREFIX}value")
_MERGE = f"{_PREFIX}merge"
_NAMES = {
    f"{_PREFIX}{name}": meaning
    for name, meaning in {
        "null": "not null",
        "bool": "neither true nor false",
        "int": "no whole number",
        "float": "no number",
        "str": "no text",
        "merge": "no text",
    }.items()
}
_NUMBERS = (f"{_PREFIX}int", f"{_PREFIX}float")
_QUOTE_IT = "quote a text that begins with {}"

# What the constructors of PyYAML raise for a value that does not fit its tag, and its scanner for
# an escape beyond Unicode or a version of 5,000 digits.
_MISFITS = (ValueError, LookupError, AttributeError, OverflowError)


@dataclass(frozen=True, slots=True)
class YamlProblem:
    """A mistake: its line, from 1, the place of the value, and a sentence."""

    line: int
    place: Place
    text: str


@dataclass(frozen=True, slots=True)
class YamlDocument:
    """The value of a text, the lines of its parts by their places, and all its mistakes."""

    value: Any = None
    lines: Mapping[Place, int] = field(default_factory=dict)
    problems: tuple[YamlProblem, ...] = ()


def read_yaml(
    text: str, *, under: Place = (), is_secret: Callable[[Place], bool] = lambda _: False
) -> YamlDocument:
    """The values of a text; never raises. Aliases are copied, and dates stay texts.

    `under` is the place of the whole text. No problem shows the value of a secret place.
    """
    try:
        loader = _Loader(text, is_secret)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        return _invalid(line, under, f"unacceptable character #x{error.character:04x}")
    try:
        node = loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = 1 if mark is None else mark.line + 1
        return _invalid(line, under, _sentence(error))
    except _MISFITS:
        return _invalid(loader.line + 1, under, "a number in an escape or a directive is too large")
    value = None if node is None else loader.value(node, under)
    return YamlDocument(value, loader.lines, tuple(loader.problems))


def _invalid(line: int, place: Place, why: str) -> YamlDocument:
    return YamlDocument(problems=(YamlProblem(line, place, f"is not YAML: {why}"),))


def _sentence(error: yaml.MarkedYAMLError) -> str:
    """Its message without the line of the text, which may hold a secret."""
    problem = str(error.problem)
    if "tag handle" in problem:
        problem = _QUOTE_IT.format("!")
    column = "" if error.problem_mark is None else f" (column {error.problem_mark.column + 1})"
    return f"{error.context}: {problem}{column}" if error.context else f"{problem}{column}"


class _Loader(yaml.SafeLoader):
    """Composes nodes within bounds and makes values of them; dates stay texts."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class declares it
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _NOT_RESOLVED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str, is_secret: Callable[[Place], bool]) -> None:
        super().__init__(text)
        self.lines: dict[Place, int] = {}
        self.problems: list[YamlProblem] = []
        self._is_secret = is_secret
        self._nodes = 0
        self._depth = 0
        self._sizes: dict[str, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """The next node. Raises ComposerError beyond a bound, or for an alias of no value."""
        event: yaml.NodeEvent = self.peek_event()  # type: ignore[no-untyped-call]
        before, anchor = self._nodes, event.anchor
        if isinstance(event, yaml.AliasEvent):
            if anchor not in self._sizes:
                # The name is not shown: it may be a password that begins with *.
                raise _composer_error(
                    "an alias of no earlier value; " + _QUOTE_IT.format("*"), event
                )
            self._nodes += self._sizes[anchor]
        self._nodes += 1
        self._depth += 1
        if self._nodes > _MAX_NODES:
            raise _composer_error(
                f"more than {_MAX_NODES:,} values, aliases counted in full", event
            )
        if self._depth > _MAX_DEPTH:
            raise _composer_error(f"more than {_MAX_DEPTH} levels", event)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._sizes.setdefault(anchor, self._nodes - before)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """A mapping; a repeated key is a problem, as it would silently replace the first."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in seen:
                self._problem(key, (), f"the key {shown(key.value)} is repeated")
            seen.add(key.value)
        return node

    def value(self, node: yaml.Node, place: Place) -> Any:
        """The value of a node; UNREAD if it has a problem."""
        self.lines.setdefault(place, node.start_mark.line + 1)
        if len(place) > _MAX_DEPTH:
            self._problem(node, place[:3], f"has more than {_MAX_DEPTH} levels")
        elif isinstance(node, yaml.ScalarNode):
            return self._scalar(node, place)
        elif node.tag not in (f"{_PREFIX}seq", f"{_PREFIX}map"):
            self._problem(node, place, f"has a tag; {_QUOTE_IT.format('!')}")
        elif isinstance(node, yaml.SequenceNode):
            return [self.value(each, (*place, number)) for number, each in enumerate(node.value)]
        elif isinstance(node, yaml.MappingNode):
            return self._mapping(node, place)
        return UNREAD

    def _mapping(self, node: yaml.MappingNode, place: Place) -> dict[str, Any]:
        try:
            self.flatten_mapping(node)
        except yaml.constructor.ConstructorError:
            self._problem(node, place, "has a << of something else than mappings")
        found = {}
        for key_node, value_node in node.value:
            key = self._key(key_node, place)
            if isinstance(key, str):
                self.lines.setdefault((*place, key), key_node.start_mark.line + 1)
                found[key] = self.value(value_node, (*place, key))
        return found

    def _key(self, node: yaml.Node, place: Place) -> Any:
        """The key of a mapping; one that is not a text has a problem."""
        if not isinstance(node, yaml.ScalarNode):
            self._problem(node, place, "has a key that is a list or a mapping")
            return UNREAD
        key = self._scalar(node, place)
        if key is not UNREAD and not isinstance(key, str):
            text = node.value or "null"
            self._problem(node, (*place, text), f"the key {shown(text)} is not a text; quote it")
        return key

    def _scalar(self, node: yaml.ScalarNode, place: Place) -> Any:
        text, problem = node.value, None
        if node.tag not in _NAMES:
            problem = f"has a tag; {_QUOTE_IT.format('!')}"
        elif node.tag in _NUMBERS and len(text) > _MAX_NUMBER:
            problem = f"is a number of {len(text)} characters; quote it if it is a text"
        elif "\0" in text or not _is_unicode(text):
            problem = "holds a character that no text may hold"
        if problem is None:
            try:
                # As a value, << merges nothing.
                return text if node.tag == _MERGE else self.construct_object(node)
            except _MISFITS:
                value = "" if self._is_secret(place) else f"{shown(text)} "
                problem = f"{value}is {_NAMES[node.tag]}"
        self._problem(node, place, problem)
        return UNREAD

    def _problem(self, node: yaml.Node, place: Place, text: str) -> None:
        self.problems.append(YamlProblem(node.start_mark.line + 1, place, text))


def _composer_error(problem: str, event: Any) -> yaml.composer.ComposerError:
    return yaml.composer.ComposerError(problem=problem, problem_mark=event.start_mark)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
