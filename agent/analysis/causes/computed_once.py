"""A property that is computed at its first use and kept in the object."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

_Value = TypeVar("_Value")


class computed_once(Generic[_Value]):  # noqa: N801 - a decorator, as `functools.cached_property`
    """`functools.cached_property` without its lock, which would take most of the time."""

    def __init__(self, compute: Callable[[Any], _Value]) -> None:
        self._compute = compute
        self._name = compute.__name__
        self.__doc__ = compute.__doc__

    @overload
    def __get__(self, owner: None, kind: type) -> "computed_once[_Value]": ...
    @overload
    def __get__(self, owner: object, kind: type) -> _Value: ...
    def __get__(self, owner: object, kind: type) -> "_Value | computed_once[_Value]":
        """The value, stored as an attribute: the next access does not come here."""
        if owner is None:
            return self
        value = self._compute(owner)
        # Access to `owner.__dict__` would first make that dictionary.
        setattr(owner, self._name, value)
        return value
