"""The limits in an engine's command line."""

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise

from agent.catalog.engine_flags import LIMIT_FLAGS

_FLAGS = frozenset(flag for flags in LIMIT_FLAGS.values() for flag in flags)
# vLLM 0.32 `vllm/utils/argparse_utils.py`, human_readable_int: small letters are powers of ten.
_NUMBER = re.compile(r"([0-9]{1,15})(?:(\.[0-9]{1,15})?([kmgt])|([KMGT]))?", re.ASCII)
_DECIMAL = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def limits_given(words: Sequence[str]) -> Mapping[str, int]:
    """The limits in the words of a command line, by fact name.

    A limit that is not a number, such as `auto`, is left out: a default is never guessed.
    """
    given: dict[str, int | None] = {}
    for word, following in pairwise([*words, ""]):
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in _FLAGS:
            given[flag] = _number(value if equals else following)
    limits = {
        limit.name: next((number for flag in flags if (number := given.get(flag))), None)
        for limit, flags in LIMIT_FLAGS.items()
    }
    return {name: number for name, number in limits.items() if number is not None}


def _number(text: str) -> int | None:
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        return None
    whole, part, decimal, binary = found.groups()
    if decimal:
        return int(float(whole + (part or "")) * _DECIMAL[decimal])
    return int(whole) * _BINARY.get(binary, 1)
