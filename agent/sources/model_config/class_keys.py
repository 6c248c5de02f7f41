"""The keys of a config.json as its class reads them: its defaults for missing ones, no others."""

from collections.abc import Iterator, Mapping
from typing import Any

from agent.catalog.architectures import ARCHITECTURES, ModelClass, Wrapper, model_classes
from agent.sources.model_config.config import EVERYWHERE, RENAMES
from agent.sources.model_config.config_errors import ArchitectureUnknown, ModelConfigInvalid

# Keys of a multimodal model that are outside of its text part and apply to it too.
_SHARED = ("torch_dtype", "dtype", "quantization_config")

# Wrappers whose older files have the keys of the text part beside their own.
_FLAT = frozenset({"qwen2_vl", "qwen2_5_vl"})

_TIED = "tie_word_embeddings"
# Keys of the whole model, which its text part has for itself alone.
_OUTSIDE = (_TIED, "architectures", "id2label", "num_labels")


def text_keys(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the text part, under our names and with the defaults of its class.

    Raises ArchitectureUnknown for an unknown model type, ModelConfigInvalid without one.
    """
    text = content.get("text_config")
    if not isinstance(text, Mapping):
        return _flat(content)
    inner = {key: value for key, value in text.items() if key not in _OUTSIDE}
    outer = {key: content[key] for key in (*_SHARED, *_OUTSIDE) if content.get(key) is not None}
    wrapper = model_classes().wrappers.get(str(content.get("model_type")))
    if wrapper is not None:
        inner.setdefault("model_type", wrapper.text)
    return {**_by_class({**outer, **inner}), _TIED: _tied(content, text, wrapper)}


def _flat(content: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a file without a text part of its own."""
    name = content.get("model_type")
    if not isinstance(name, str) or name not in _FLAT:
        return _by_class(content)
    wrapper = model_classes().wrappers[name]
    # The class of the text part does not have the key: only wrappers generate.
    keys = _by_class({**content, "model_type": wrapper.text})
    return {**keys, _TIED: content.get(_TIED, wrapper.tied)}


def _tied(content: Mapping[str, Any], text: Mapping[str, Any], wrapper: Wrapper | None) -> bool:
    """Whether the embeddings are tied: the wrapper decides, as in transformers and vLLM."""
    given = content.get(_TIED)
    if wrapper is None and given is None:
        raise ArchitectureUnknown(
            str(content.get("model_type")),
            f"no row describes this wrapper of {text.get('model_type')!r}, and its config.json "
            f"lacks {_TIED}, which decides the size of the output matrix",
            model_classes().wrappers,
        )
    if wrapper is None or given:
        return bool(given)
    inner = text.get(_TIED)
    if inner is None:
        inner = _by_class({"model_type": wrapper.text, **text}).get(_TIED)
    if not inner:
        return wrapper.tied and given is None
    return wrapper.tied_over_tied if given is None else wrapper.untied_over_tied


def _by_class(given: Mapping[str, Any]) -> dict[str, Any]:
    name = given.get("model_type")
    if not isinstance(name, str):
        raise ModelConfigInvalid("names no model_type; give a model's config.json")
    if name not in ARCHITECTURES:
        raise ArchitectureUnknown(name, "no row describes it", ARCHITECTURES)
    row = ARCHITECTURES[name]
    model_class = model_classes().classes[row.class_of or name]
    known = dict(_known(given, model_class))
    defaults = dict(_renamed(model_class.defaults, row.renames))
    return _with_layers({**defaults, **dict(_renamed(known, row.renames))})


def _with_layers(keys: dict[str, Any]) -> dict[str, Any]:
    """With the number of layers, which the class of Nemotron-H takes from their list."""
    listed = keys.get("layer_types") or keys.get("hybrid_override_pattern")
    if "num_hidden_layers" in keys or not isinstance(listed, (list, str)):
        return keys
    return {**keys, "num_hidden_layers": len(listed)}


def _known(given: Mapping[str, Any], model_class: ModelClass) -> Iterator[tuple[str, Any]]:
    """The keys that the class reads, its own first: its other names for them are set later.

    Nulls of keys without a default count as missing. Raises ModelConfigInvalid for other nulls that
    the class refuses.
    """
    for key in model_class.defaults.keys() & given.keys():
        if given[key] is None and key in model_class.not_null:
            raise ModelConfigInvalid(
                f"{key} is null, which its class in transformers refuses; give a value, or leave "
                f"the key out for the class's own ({model_class.defaults[key]})"
            )
        yield key, given[key]
    for key in ((EVERYWHERE | model_class.others) - model_class.defaults.keys()) & given.keys():
        if given[key] is not None:
            yield key, given[key]


def _renamed(
    keys: Mapping[str, Any], renames: Mapping[str, tuple[str, ...]]
) -> Iterator[tuple[str, Any]]:
    for key, value in keys.items():
        for name in renames.get(key, (RENAMES.get(key, key),)):
            yield name, value
