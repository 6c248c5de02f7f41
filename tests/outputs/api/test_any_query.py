"""Whatever is asked, the API answers as its OpenAPI document says."""

import re
from typing import Any
from urllib.parse import quote

import pytest
import requests
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from tests.outputs.api.serving import Api

# It answers until its client leaves.
STREAMS = "/api/v1/live"

# The same examples each time: a test that fails must fail again.
fuzz = settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)

# Characters with a meaning somewhere on the way, and some of each length in UTF-8.
TEXTS = st.lists(
    st.sampled_from("aZ09-_.,:;/\\%&=#?+*'\"<>{}[] \t\n\r\0\x1b\x7fé漢\U0001f600")
).map("".join)
# Words of the API itself get further than others.
WORDS = st.sampled_from(
    [
        *(
            "",
            "0",
            "-1",
            "1",
            "1000",
            "1e999",
            "NaN",
            "9" * 30,
            "true",
            "null",
            "*",
            "%",
            "'",
            "\0",
        ),
        *("5m", "1h", "30d", "0s", "-5m", "1y", "400d", "9999999d"),
        *("model", "tenant", "engine", "input_length", "user", "ttft", "e2e", "met", "missed"),
        *("2026-11-01T00:00:00Z", "chat", "chat-0", "llama", "vllm"),
    ]
)
VALUES = WORDS | TEXTS
NAMES = VALUES.filter(lambda text: text not in ("", ".", ".."))

_PARAMETER = re.compile(r"\{[^}]*\}")


class Document:
    """The OpenAPI document. Hypothesis warns of arguments whose text is long, so it has none."""

    def __init__(self, paths: dict[str, Any], components: dict[str, Any]) -> None:
        self.paths = paths
        self.components = components


@pytest.fixture(scope="module")
def document(busy: Api) -> Document:
    found = busy.get("/openapi.json").json()
    return Document(found["paths"], found["components"])


@fuzz
@given(place=st.integers(0, 99), name=NAMES, given_values=st.lists(VALUES | st.none(), max_size=8))
def test_the_answer_is_one_that_the_document_has(
    busy: Api, document: Document, place: int, name: str, given_values: list[str | None]
) -> None:
    paths = sorted(document.paths.keys() - {STREAMS})
    path = paths[place % len(paths)]
    operation = document.paths[path]["get"]
    queried = [each["name"] for each in operation.get("parameters", []) if each["in"] == "query"]
    # Of those without a value the API has its own.
    query = {
        key: text for key, text in zip(queried, given_values, strict=False) if text is not None
    }
    response = busy.get(_PARAMETER.sub(lambda _: quote(name, safe=""), path), **query)
    check(response, operation["responses"], document.components)


def check(response: requests.Response, answers: dict[str, Any], components: dict[str, Any]) -> None:
    """Its status, its kind of content and its body are documented."""
    if response.status_code == 404 and response.json() == {"detail": "Not Found"}:
        # A path of slashes or dots may be none at all.
        return
    assert str(response.status_code) in answers, response.text
    documented = answers[str(response.status_code)].get("content", {"text/html": {}})
    kind = response.headers["Content-Type"].partition(";")[0]
    assert kind in documented
    if kind == "application/json":
        named = {**documented[kind]["schema"], "components": components}
        assert list(Draft202012Validator(named).iter_errors(response.json())) == []
