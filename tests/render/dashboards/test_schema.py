"""Checks a dashboard by Grafana's own models: unknown names and values that are not allowed.

The models are those of grafana-foundation-sdk, made from Grafana's schemas: what a model does not
know is lost on the way through it.
"""

import json
import warnings
from collections.abc import Iterator
from enum import Enum
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest
from grafana_foundation_sdk.cog import plugins
from grafana_foundation_sdk.cog.encoder import JSONEncoder

from tests.render.dashboards.reading import Json, dashboards

with warnings.catch_warnings():
    # They would rather have the newest schema, which no Grafana before 13 reads from a file.
    warnings.simplefilter("ignore", DeprecationWarning)
    from grafana_foundation_sdk.models.dashboard import Dashboard

plugins.register_default_plugins()


def complaints(dashboard: Json) -> Iterator[str]:
    """Complaints of Grafana's models about a dashboard; a wrong shape raises."""
    model = Dashboard.from_json(dashboard)
    yield from _lost(dashboard, json.loads(JSONEncoder().encode(model)), "dashboard")
    yield from _not_allowed(model, "dashboard")


def _lost(written: Any, parsed: Any, place: str) -> Iterator[str]:
    if isinstance(written, dict) and isinstance(parsed, dict):
        for name, value in written.items():
            # Models leave out what is null.
            if name in parsed:
                yield from _lost(value, parsed[name], f"{place}.{name}")
            elif value is not None:
                yield f"{place}.{name} is unknown"
    elif isinstance(written, list) and isinstance(parsed, list) and len(written) == len(parsed):
        for number, pair in enumerate(zip(written, parsed, strict=True)):
            yield from _lost(*pair, f"{place}[{number}]")
    elif written != parsed:
        yield f"{place} is {written!r} and becomes {parsed!r}"


def _not_allowed(value: Any, place: str) -> Iterator[str]:
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _not_allowed(item, f"{place}[{number}]")
    elif type(value).__module__.startswith("grafana_foundation_sdk.models"):
        for name, hint in get_type_hints(type(value)).items():
            inside = getattr(value, name)
            allowed = set(_allowed(hint))
            if allowed and isinstance(inside, str | int) and inside not in allowed:
                yield f"{place}.{name} is {inside!r}, not of {allowed}"
            yield from _not_allowed(inside, f"{place}.{name}")


def _allowed(hint: Any) -> Iterator[Any]:
    """The values of an enumeration; nothing for any other type, or for one among others."""
    choices = [item for item in get_args(hint) if item is not type(None)]
    if get_origin(hint) is Union and len(choices) == 1:
        yield from _allowed(choices[0])
    elif get_origin(hint) is Literal:
        yield from get_args(hint)
    elif isinstance(hint, type) and issubclass(hint, Enum):
        yield from (member.value for member in hint)


ALL = {dashboard["uid"]: dashboard for dashboard in dashboards()}


@pytest.mark.parametrize("uid", ALL)
def test_grafana_s_models_know_every_name_and_value(uid: str) -> None:
    assert list(complaints(ALL[uid])) == []
