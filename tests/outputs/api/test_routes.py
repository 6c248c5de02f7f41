"""The live figures: once for all viewers, a problem where the store is away, an end at the stop."""

import asyncio
import json
import socket
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import requests
from fastapi.openapi.models import OpenAPI
from jsonschema import Draft202012Validator

from agent.analysis.burn_rates import BURN, OUTAGE
from agent.analysis.tally import INPUT_LENGTHS, OUTPUT_LENGTHS
from agent.catalog.causes import Cause
from agent.errors import StoreUnavailable
from agent.outputs.api import routes
from agent.outputs.api.descriptions import DESCRIPTIONS, EXAMPLES, PARAMETERS
from agent.outputs.api.routes import LiveFigures, LiveResponse
from agent.settings.access import AccessPolicy, TokenFile
from tests.outputs.api.serving import Api, open_api
from tests.records.making import objective, record

WITHIN_S = 60.0
TOKEN, OTHER = "the-token-to-be-removed", "the-token-that-stays-valid"


def events(response: requests.Response) -> Iterator[tuple[str, Any]]:
    """The name and the data of each event."""
    name = ""
    for line in response.iter_lines():
        field, _, value = line.decode().partition(": ")
        if field == "event":
            name = value
        if field == "data":
            yield name, json.loads(value)


def follow(api: Api, token: str = "") -> requests.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return requests.get(f"{api.url}/api/v1/live", headers=headers, stream=True, timeout=WITHIN_S)


def test_the_figures_are_those_of_the_summary_and_the_lists(api: Api) -> None:
    api.store([record(1, ended_at=api.agent.now - 1)], [objective()])
    api.beat("chat")
    with follow(api) as response:
        assert response.headers["Content-Type"].startswith("text/event-stream")
        name, figures = next(events(response))
    assert name == "figures"
    summary = api.get("/api/v1/summary?window=5m").json()
    assert figures["lately"] == {name: summary[name] for name in ("window_s", "met", "missed")}
    assert figures["lately"]["met"] == 1
    assert figures["engines"] == api.get("/api/v1/engines").json()["items"]
    assert figures["gpus"] == api.get("/api/v1/gpus").json()["items"]
    assert [agent["name"] for agent in figures["agents"]] == ["chat"]


def test_a_stop_ends_every_stream(tmp_path: Any) -> None:
    with open_api(tmp_path) as api:
        response = follow(api)
        followed = events(response)
        assert next(followed)
    assert list(followed) is not None
    assert response.raw.closed


@pytest.mark.parametrize(
    "remove", [lambda file: file.write_text(OTHER), lambda file: file.unlink()]
)
def test_a_stream_ends_with_its_token_and_others_go_on(
    tmp_path: Path, remove: Callable[[Path], Any]
) -> None:
    read_tokens = tmp_path / "tokens"
    read_tokens.write_text(f"{TOKEN}\n{OTHER}\n")
    tokens = TokenFile("security.read_tokens", read_tokens)
    access = AccessPolicy(tokens=tokens)
    with open_api(tmp_path, access=access) as api:
        streams = {token: events(follow(api, token)) for token in (TOKEN, OTHER)}
        assert [next(stream)[0] for stream in streams.values()] == ["figures", "figures"]
        remove(read_tokens)
        tokens.refresh()
        assert len(list(streams[TOKEN])) <= 1
        if read_tokens.exists():
            assert next(streams[OTHER])[0] == "figures"
        else:
            assert len(list(streams[OTHER])) <= 1


class Counted:
    """Reads figures that fail, and counts how often it was asked."""

    reads = 0

    def read(self) -> LiveResponse:
        """Refuse."""
        self.reads += 1
        raise StoreUnavailable("away")


async def first_events(live: LiveFigures, viewers: int) -> list[str]:
    """The name and words of the first event of each viewer; all stay."""
    streams = [live.stream(lambda: True) for _ in range(viewers)]
    found = [await anext(stream) for stream in streams]
    live.stop()
    for stream in streams:
        await stream.aclose()  # type: ignore[attr-defined]
    return [str(event.data) for event in found]


def test_many_viewers_cost_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "EVERY_S", 1000.0)
    counted = Counted()
    found = asyncio.run(first_events(LiveFigures(counted.read), 20))
    assert len(set(found)) == 1
    assert counted.reads == 1


def test_a_viewer_too_many_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routes, "MOST_VIEWERS", 3)
    *_, last = asyncio.run(first_events(LiveFigures(Counted().read), 4))
    assert last == "3 pages are open already; this one is not live"


QUERIES = (
    *("summary", "timeseries", "requests", "requests/{request_id}", "events", "objectives"),
    *("breakdown", "gpus", "gpus/{gpu}", "efficiency", "lengths"),
)


def test_a_database_failure_is_a_503_and_the_process_is_alive(tmp_path: Path) -> None:
    with open_api(tmp_path, migrated=False) as api:
        for path in QUERIES:
            response = api.get(f"/api/v1/{path}")
            assert response.status_code == 503, path
            assert response.headers["Retry-After"] == "1"
            assert response.json()["detail"].startswith("the database does not answer")
            assert "SELECT" not in response.text
        assert api.get("/healthz").json() == {"status": "ok", "problems": []}
        with follow(api) as response:
            name, sentence = next(events(response))
    assert name == "problem"
    assert "database" in sentence


def test_an_agent_without_problems_is_ready(api: Api) -> None:
    ready, parts = api.get("/readyz"), {"store": "ok"}
    assert ready.status_code == 200
    assert ready.json() == {"status": "ok", "problems": [], "parts": parts}
    api.agent.problems.append("the database does not answer")
    response = api.get("/readyz")
    assert response.status_code == 503
    problems = ["the database does not answer"]
    assert response.json() == {"status": "not ready", "problems": problems, "parts": parts}
    api.agent.problems.clear()
    assert api.get("/readyz").status_code == 200


def test_an_exposition_that_cannot_be_made_is_named_until_it_can(api: Api) -> None:
    usual = api.agent.metrics

    def broken(_accept: str) -> tuple[bytes, str]:
        raise ValueError("no number: x")

    api.agent.metrics = broken
    assert api.get("/metrics").status_code == 500
    ready = api.get("/readyz")
    assert ready.status_code == 200
    assert ready.json()["parts"]["metrics"] == "/metrics fails: ValueError: no number: x"
    api.agent.metrics = usual
    assert api.get("/metrics").status_code == 200
    assert "metrics" not in api.get("/readyz").json()["parts"]


def test_the_process_is_alive_while_every_thread_waits_for_the_database(api: Api) -> None:
    go = threading.Event()
    waiting = threading.Semaphore(0)

    class Stuck(list[Any]):
        def __iter__(self) -> Iterator[Any]:
            waiting.release()
            go.wait(120)
            return super().__iter__()

    api.agent.engines = Stuck()

    def ask() -> None:
        requests.get(f"{api.url}/api/v1/engines", timeout=180)

    # More than the framework has threads.
    clients = [threading.Thread(target=ask) for _ in range(60)]
    for thread in clients:
        thread.start()
    for _ in range(40):
        assert waiting.acquire(timeout=30)
    try:
        for path in ("/healthz", "/readyz"):
            assert requests.get(f"{api.url}{path}", timeout=10).status_code == 200
    finally:
        go.set()
        for thread in clients:
            thread.join()


# The document


def test_the_document_is_valid_openapi_of_typed_queries(busy: Api) -> None:
    document = busy.get("/openapi.json").json()
    OpenAPI.model_validate(document)
    assert {f"/api/v1/{path}" for path in QUERIES} <= document["paths"].keys()
    problem = {
        "application/problem+json": {"schema": {"$ref": "#/components/schemas/ProblemResponse"}}
    }
    for path, methods in document["paths"].items():
        assert list(methods) == ["get"], f"{path} is no query"
        assert methods["get"]["description"], path
        if path.startswith("/api/"):
            responses = methods["get"]["responses"]
            assert all("$ref" in each["schema"] for each in responses["200"]["content"].values())
            assert responses["422"]["content"] == responses["503"]["content"] == problem, path


def test_every_parameter_and_property_has_a_description_and_an_example(busy: Api) -> None:
    document = busy.get("/openapi.json").json()
    schemas = document["components"]["schemas"]
    described = [
        (f"{path} {given['name']}", given, given["schema"])
        for path, methods in document["paths"].items()
        for given in methods["get"].get("parameters", ())
    ]
    for model, schema in schemas.items():
        properties = schema.get("properties", {})
        described += [(f"{model}.{name}", found, found) for name, found in properties.items()]
    assert len(described) > 900
    for where, described_as, schema in described:
        assert described_as.get("description"), where
        assert schema.get("examples") or _of_models(schema, schemas), where
        whole = {**schema, "components": {"schemas": schemas}}
        for example in schema.get("examples", ()):
            Draft202012Validator(whole).validate(example)


def test_examples_of_names_are_names_that_there_are() -> None:
    assert EXAMPLES["alert"] in (BURN, OUTAGE)
    assert EXAMPLES["cause"] in set(Cause)
    assert {*EXAMPLES["input_lengths"], EXAMPLES["input_length"]} <= set(INPUT_LENGTHS)
    assert {*EXAMPLES["output_lengths"], EXAMPLES["output_length"]} <= set(OUTPUT_LENGTHS)


def _of_models(schema: Any, schemas: Any) -> bool:
    """Whether the schema is of objects whose own properties have examples."""
    if "$ref" in schema:
        return "properties" in schemas[schema["$ref"].split("/")[-1]]
    inner = [*schema.get("anyOf", ()), schema.get("items"), schema.get("additionalProperties")]
    return any(isinstance(each, dict) and _of_models(each, schemas) for each in inner) or (
        schema.get("type") == "object" and schema.get("additionalProperties") in (True, None)
    )


def test_no_description_is_of_something_that_is_no_longer_there(busy: Api) -> None:
    document = busy.get("/openapi.json").json()
    names = {
        name: {f"{model}.{name}" for model in document["components"]["schemas"]}
        for schema in document["components"]["schemas"].values()
        for name in schema.get("properties", {})
    }
    properties = {*names, *chain.from_iterable(names.values())}
    parameters = {
        given["name"]
        for methods in document["paths"].values()
        for given in methods["get"].get("parameters", ())
    }
    assert DESCRIPTIONS.keys() <= properties
    assert PARAMETERS.keys() <= parameters
    assert EXAMPLES.keys() <= properties | parameters


def test_a_generated_client_has_a_function_of_each_path_by_its_plain_name(busy: Api) -> None:
    paths = busy.get("/openapi.json").json()["paths"]
    names = [methods["get"]["operationId"] for methods in paths.values()]
    assert len(names) == len({*names})
    for path, name in zip(paths, names, strict=True):
        if path.startswith("/api/v1/") and "{" not in path:
            assert name == path.removeprefix("/api/v1/")


def test_the_document_says_where_a_token_may_be_needed(busy: Api) -> None:
    document = busy.get("/openapi.json").json()
    assert document["components"]["securitySchemes"]["token"]["scheme"] == "bearer"
    of_paths = {
        path: methods["get"].get("security", []) for path, methods in document["paths"].items()
    }
    assert of_paths["/api/v1/summary"] == of_paths["/metrics"] == [{}, {"token": []}]
    assert of_paths["/healthz"] == []


RUNBOOKS = Path(__file__).parents[3] / "docs" / "runbooks"
RUNBOOK_NAMES = sorted(path.name for path in RUNBOOKS.iterdir())


def test_every_runbook_is_plain_text_for_programs(busy: Api) -> None:
    assert "LlmEngineDown.md" in RUNBOOK_NAMES
    for name in RUNBOOK_NAMES:
        response = busy.get(f"/runbooks/{name}")
        assert response.status_code == 200
        assert response.headers["Content-Type"] == "text/plain; charset=utf-8"
        assert response.text == (RUNBOOKS / name).read_text(encoding="utf-8")
    assert busy.get("/runbooks/GpuLost").text.startswith("# GpuLost\n")


@pytest.mark.parametrize("name", ["LlmNothing", "gpulost.md", "a/b", ""])
def test_an_unknown_runbook_is_refused_with_a_sentence(busy: Api, name: str) -> None:
    response = busy.get(f"/runbooks/{name}")
    assert response.status_code == 404
    sentence = f"there is no runbook {name!r}; see /runbooks/README.md"
    assert response.headers["Content-Type"] == "application/problem+json"
    assert response.json() == {"title": "Not Found", "status": 404, "detail": sentence}


@pytest.mark.parametrize(
    "path",
    [
        "../deploy.md",
        "..%2Fdeploy.md",
        "%2e%2e%2fdeploy",
        "../../../../../../../../etc/passwd",
        "/etc/passwd",
        "%2Fetc%2Fpasswd",
        "..\\deploy.md",
        "GpuLost.md%00",
        "./GpuLost.md",
    ],
)
def test_no_path_leads_out_of_the_folder(busy: Api, path: str) -> None:
    # On a plain socket: HTTP clients normalise the path.
    address = urlsplit(busy.url)
    with socket.create_connection((address.hostname or "", address.port or 0), 30) as client:
        client.sendall(f"GET /runbooks/{path} HTTP/1.0\r\n\r\n".encode())
        response = b"".join(iter(lambda: client.recv(65536), b""))
    assert response.split(b" ")[1] == b"404", response
    assert b"there is no runbook" in response


# Size and copies


def test_large_responses_are_compressed_and_small_ones_and_streams_are_not(busy: Api) -> None:
    def encoding(path: str) -> str | None:
        with requests.get(f"{busy.url}{path}", timeout=WITHIN_S, stream=True) as response:
            return response.headers.get("Content-Encoding")

    assert encoding("/openapi.json") == encoding("/assets/vendor/swagger-ui.js") == "gzip"
    assert encoding("/healthz") is encoding("/api/v1/live") is None


def test_a_browser_asks_whether_its_copy_of_a_file_is_the_newest(busy: Api) -> None:
    first = busy.get("/assets/page.js")
    assert first.headers["Cache-Control"] == "no-cache"
    known = {"If-None-Match": first.headers["ETag"]}
    again = requests.get(f"{busy.url}/assets/page.js", headers=known, timeout=WITHIN_S)
    assert (again.status_code, again.content) == (304, b"")


# Unknown parameters


@pytest.mark.parametrize(
    ("path", "given", "sentence"),
    [
        ("summary", "windw", "'windw' is not a parameter of this query; did you mean window?"),
        ("requests", "min_ttft", "did you mean min_ttft_s?"),
        ("gpus/GPU-1", "curser", "did you mean cursor?"),
        ("starts", "x", "known are "),
        ("agents", "engine", "'engine' is not a parameter of this query; known are none"),
        ("live", "window", "'window' is not a parameter of this query; known are none"),
    ],
)
def test_an_unknown_parameter_is_refused_with_the_nearest_known(
    busy: Api, path: str, given: str, sentence: str
) -> None:
    status, detail = busy.refusal(path, **{given: "5m"})
    assert status == 422
    assert sentence in detail


def test_every_query_refuses_unknown_parameters_and_names_those_of_its_document(
    busy: Api,
) -> None:
    for path, methods in busy.get("/openapi.json").json()["paths"].items():
        if path.startswith("/api/v1/"):
            known = {
                each["name"]
                for each in methods["get"].get("parameters", ())
                if each["in"] == "query"
            }
            _, detail = busy.refusal(path.removeprefix("/api/v1/"), zzz="1")
            assert set(detail.partition("known are ")[2].split(", ")) == (known or {"none"}), path


def test_a_query_that_fails_is_a_problem_that_refers_to_the_log(api: Api) -> None:
    api.agent.engines = [{"read_at": "never"}]
    sentence = "the query failed; the agent's log has the error"
    assert api.refusal("nothing") == (404, "Not Found")
    assert api.refusal("engines") == (500, sentence)
