"""The dashboard of requests without PostgreSQL, on the agent's API over a real database."""

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from typing import Any

import pytest
import requests

from tests.outputs.api.serving import Api, open_api
from tests.outputs.api.traffic import NOW, OBJECTIVES, mixed
from tests.render.dashboards.reading import Asked, Json, dashboards, on_api

(DASHBOARD,) = (item for item in dashboards() if item["uid"] == "goodput-requests-api")
QUERIES = {query.name: query for query in on_api(DASHBOARD)}
each = pytest.mark.parametrize("query", QUERIES.values(), ids=QUERIES)

HOUR_S = 3600.0
WITHIN_S = 60.0
# The values of the dashboard's fields when it is opened.
AT_FIRST = {
    item["name"]: item["current"]["value"]
    for item in DASHBOARD["templating"]["list"]
    if item["type"] != "datasource"
}

NOTHING: Mapping[str, str] = {}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with open_api(tmp_path_factory.mktemp("api")) as opened:
        opened.agent.now = NOW
        opened.store(mixed(), OBJECTIVES)
        yield opened


@pytest.fixture(scope="module")
def document(api: Api) -> Json:
    answer = requests.get(f"{api.url}/openapi.json", timeout=WITHIN_S)
    answer.raise_for_status()
    found: Json = answer.json()
    return found


def shown(query: Asked, chosen: Mapping[str, str], hours: float = 2.5) -> dict[str, str]:
    """The parameters of a query as Grafana fills them in."""
    values = {
        **AT_FIRST,
        "__from:date:iso": moment(NOW - hours * HOUR_S),
        "__to:date:iso": moment(NOW),
        **{f"one_{name}": value for name, value in chosen.items()},
    }
    return {
        item["key"]: re.sub(r"\$\{([^}]+)\}", lambda found: values[found[1]], item["value"])
        for item in query.target["url_options"]["params"]
    }


def moment(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).isoformat(timespec="milliseconds")[:-6] + "Z"


def table(
    api: Api, query: Asked, chosen: Mapping[str, str] = NOTHING, hours: float = 2.5
) -> list[dict[str, Any]]:
    """The lines that Infinity's backend parser makes of the response."""
    answer = requests.get(
        api.url + query.target["url"], params=shown(query, chosen, hours), timeout=WITHIN_S
    )
    assert answer.status_code == 200, answer.text
    items = answer.json()[query.target["root_selector"]]
    assert isinstance(items, list)
    return [
        {column["text"]: value_at(item, column["selector"]) for column in query.target["columns"]}
        for item in items
    ]


def value_at(item: Any, path: str) -> Any:
    for name in path.split("."):
        item = None if item is None else item[name]
    return item


@each
def test_the_api_answers_each_query_of_the_dashboard_as_it_opens(api: Api, query: Asked) -> None:
    table(api, query)


@each
def test_every_parameter_and_column_is_in_the_api_s_document(document: Json, query: Asked) -> None:
    operation = document["paths"][query.target["url"]]["get"]
    known = {item["name"] for item in operation["parameters"]}
    assert {item["key"] for item in query.target["url_options"]["params"]} <= known
    response = operation["responses"]["200"]["content"]["application/json"]["schema"]
    root = whole(document, whole(document, response)["properties"][query.target["root_selector"]])
    assert root["type"] == "array"
    for column in query.target["columns"]:
        assert column["type"] == grafana_type(document, root["items"], column["selector"])


def whole(document: Json, schema: Json) -> Json:
    """The schema without null and references."""
    (schema,) = [item for item in schema.get("anyOf", [schema]) if item.get("type") != "null"] or [
        schema
    ]
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    return schema


def grafana_type(document: Json, schema: Json, path: str) -> str:
    for name in path.split("."):
        schema = whole(document, whole(document, schema)["properties"][name])
    if schema.get("format") == "date-time":
        return "timestamp"
    kinds = {"integer": "number", "number": "number", "string": "string"}
    return kinds[schema["type"]]


def test_the_worst_requests_come_first_by_the_chosen_measure(api: Api) -> None:
    for measure in ("e2e", "ttft", "queue"):
        lines = table(api, QUERIES["Worst requests"], {"sort": measure})
        values = [line[measure] for line in lines]
        assert values == sorted(values, reverse=True)
        assert len(values) == 50


def test_only_requests_of_the_chosen_names_and_of_the_time_shown_are_listed(api: Api) -> None:
    names = {"engine": "chat-0", "model": "llama", "tenant": "acme"}
    lines = table(api, QUERIES["Worst requests"], names)
    assert lines
    for line in lines:
        assert {name: line[name] for name in names} == names
    recent = table(api, QUERIES["Worst requests"], hours=0.05)
    begun = [datetime.fromisoformat(line["began"]).timestamp() for line in recent]
    assert min(begun) >= NOW - 0.05 * HOUR_S
    assert recent != table(api, QUERIES["Worst requests"])


def test_the_requests_that_missed_are_those_of_the_chosen_objective(api: Api) -> None:
    query = QUERIES["Newest requests that missed"]
    of_any, of_long = table(api, query), table(api, query, {"objective": "long"})
    assert {line["verdict"] for line in of_any} == {"missed"}
    assert of_long
    assert of_long != of_any
    begun = [datetime.fromisoformat(line["began"]) for line in of_any]
    assert begun == sorted(begun, reverse=True)


def test_a_chosen_request_is_shown_by_any_of_its_ids(api: Api) -> None:
    wanted = table(api, QUERIES["Worst requests"])[7]
    for chosen in (wanted["request"], wanted["trace"]):
        (line,) = table(api, QUERIES["The request"], {"request": chosen})
        assert line.items() >= wanted.items()
        (phases,) = table(api, QUERIES["Phases of the request"], {"request": chosen})
        assert phases["queue"] == wanted["queue"]


def test_attainment_by_group_is_that_of_the_chosen_objective(api: Api) -> None:
    (acme,) = (
        line
        for line in table(api, QUERIES["By tenant"], {"objective": "long"})
        if line["tenant"] == "acme"
    )
    assert acme["attainment"] == acme["met"] / (acme["met"] + acme["missed"])
    assert acme["ttft p95"] > 0


def test_no_choice_of_another_dashboard_is_taken_for_text() -> None:
    """Links between dashboards keep variables of one name, and `All` is no engine."""
    mine = {item["name"] for item in DASHBOARD["templating"]["list"]}
    others = {
        item["name"]
        for dashboard in dashboards()
        for item in dashboard["templating"]["list"]
        if dashboard["uid"] != DASHBOARD["uid"]
    }
    assert mine & others == set()
