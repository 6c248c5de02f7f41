"""How the fields of a record are declared: the table column and the join of each, from its type.

A field is declared once, with its type and, if the default does not fit, marks in `Annotated`.
The store derives columns, rows and inserts from the declaration, and the join its rules.
"""

from dataclasses import dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Annotated, Any, NamedTuple, Union, get_args, get_origin, get_type_hints


class Join(Enum):
    """Which view of a request gives a joined record the value of a field."""

    PROXY_FIRST = "the proxy's value; the engine's if the proxy does not know it"
    ENGINE_FIRST = "the engine's value; the proxy's if the engine does not know it"
    PROXY = "the proxy's value, also if the proxy does not know it"
    ENGINE = "the engine's value, also if the engine does not know it"
    COMPUTED = "a value that the join computes from both views"


class Mark(Enum):
    """What else is special about a field."""

    # An engine's span is one choice (`n` > 1, or several prompts): its value is not the request's.
    PER_CHOICE = "the engine's value counts only if the request has one choice"
    UTC_TIMESTAMP = "Unix seconds, a timestamp in the database"
    SMALL = "a whole number of 32 bits"


class Length(NamedTuple):
    """The most characters of a text."""

    characters: int


UtcSeconds = Annotated[float, Mark.UTC_TIMESTAMP]


@dataclass(frozen=True, slots=True)
class RecordField:
    """One field of a record. `record` declares it, and `type` is its type without None."""

    record: type
    name: str
    type: Any
    nullable: bool
    join: Join
    marks: frozenset[Mark]
    length: int | None

    @property
    def is_timestamp(self) -> bool:
        """Whether the database holds the value as a timestamp."""
        return Mark.UTC_TIMESTAMP in self.marks

    @property
    def is_enum(self) -> bool:
        """Whether the value is a member of an enumeration."""
        return isinstance(self.type, type) and issubclass(self.type, Enum)

    @property
    def is_view(self) -> bool:
        """Whether the value is a record of its own."""
        return hasattr(self.type, "_fields")

    @property
    def is_json(self) -> bool:
        """Whether the value is a mapping or a list, which the database holds as JSON."""
        return get_origin(self.type) is not None


def fields_of(record: type) -> tuple[RecordField, ...]:
    """The fields of a named tuple or a dataclass, in its order."""
    hints = get_type_hints(record, include_extras=True)
    return tuple(_field(record, name, hint) for name, hint in hints.items())


def _field(record: type, name: str, hint: Any) -> RecordField:
    hint, *marks = get_args(hint) if get_origin(hint) is Annotated else (hint,)
    options = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    (kind,) = [option for option in options if option is not NoneType]
    return RecordField(
        record,
        name,
        kind,
        nullable=NoneType in options,
        join=next((mark for mark in marks if isinstance(mark, Join)), Join.PROXY_FIRST),
        marks=frozenset(mark for mark in marks if isinstance(mark, Mark)),
        length=next((mark.characters for mark in marks if isinstance(mark, Length)), None),
    )
