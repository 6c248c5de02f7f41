"""The words for losses: those that the code says are those that are declared."""

import ast
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from agent.catalog.reasons import FORWARDS_DROPPED, ProxyFailure, grpc_answer, http_answer

PROXY = Path(__file__).parents[2] / "agent/sources/proxy"
# How the proxy tells of a failure; what its connections say is a sentence and no word.
_TELLS = {"on_failure", "_on_failure", "_failed", "_fail", "_guarded"}


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def words_of_the_proxy() -> Iterator[str]:
    """What stands in its code as the first argument of a tell, or as why an answer was missed."""
    for file in PROXY.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            told: ast.expr | None = None
            if isinstance(node, ast.Call) and _name(node.func) in _TELLS and node.args:
                told = node.args[0]
            elif isinstance(node, ast.Assign) and _name(node.targets[0]) == "missed":
                told = node.value
            if isinstance(told, ast.Constant) and isinstance(told.value, str):
                yield told.value


def test_the_proxy_says_the_words_that_are_declared() -> None:
    words = {word for word in words_of_the_proxy() if " " not in word}
    stored = {"store_behind", "store_away_at_stop", "record_refused"}
    assert words == {str(reason) for reason in ProxyFailure} - stored


def test_every_code_that_a_grpc_destination_can_answer_has_a_word() -> None:
    codes = {code.name for code in grpc.StatusCode} - {"OK"}
    assert {grpc_answer(code) for code in codes} <= set(FORWARDS_DROPPED)


@pytest.mark.parametrize(
    ("status", "word"), [(503, "http_503"), (413, "http_413"), (418, "http_other")]
)
def test_rare_answers_of_a_destination_share_a_word(status: int, word: str) -> None:
    assert http_answer(status) == word
    assert word in FORWARDS_DROPPED
