"""The configuration classes of transformers 5.19: their keys and the defaults of missing ones.

The rows of model_classes.json are generated: `tests/sources/model_config/test_transformers.py`
compares them with the classes and prints what they should be.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class ModelClass:
    """One class: the defaults of its keys, null where it derives one, and its keys without any.

    `not_null` are the keys that may not be null in a file.
    """

    defaults: Mapping[str, object]
    others: frozenset[str]
    not_null: frozenset[str]


@dataclass(frozen=True, slots=True)
class Wrapper:
    """A multimodal class: the type of its text part, and whether its embeddings are tied.

    `tied` is its default; `tied_over_tied` that over a text part that ties; `untied_over_tied` what
    becomes of a false of its own over one: some classes take the text part's then.
    """

    text: str
    tied: bool
    tied_over_tied: bool
    untied_over_tied: bool


@dataclass(frozen=True, slots=True)
class ModelClasses:
    """All classes by their model type, and all wrappers by theirs."""

    classes: Mapping[str, ModelClass]
    wrappers: Mapping[str, Wrapper]


@cache
def model_classes() -> ModelClasses:
    """The rows of model_classes.json."""
    text = files("agent.catalog").joinpath("model_classes.json").read_text(encoding="utf-8")
    rows = json.loads(text)
    return ModelClasses(
        {
            name: ModelClass(row["defaults"], frozenset(row["others"]), frozenset(row["not_null"]))
            for name, row in rows["classes"].items()
        },
        {name: Wrapper(**row) for name, row in rows["wrappers"].items()},
    )
