"""Panels on single requests from the agent's API, for an agent without PostgreSQL."""

from collections.abc import Mapping
from dataclasses import replace

from agent.render.dashboards.panel_parts import (
    BARS,
    TABLE,
    Api,
    ApiColumn,
    ApiType,
    Column,
    Link,
    Panel,
    PanelRow,
    PanelUnit,
)
from agent.render.links import OF_API, DashboardUid

WORST_BY = ("e2e", "ttft", "tpot", "queue", "cost", "input_tokens", "output_tokens")
# The API takes an empty parameter for an absent one, so empty text fields choose everything.
CHOSEN = ("engine", "model", "tenant", "objective")

_SELECTION = {name: f"${{{OF_API.prefix}{name}}}" for name in CHOSEN}
_STARTED = {"started_from": "${__from:date:iso}", "started_until": "${__to:date:iso}"}
_WINDOW = {"from": "${__from:date:iso}", "until": "${__to:date:iso}"}


def _seconds(*names: str) -> tuple[ApiColumn, ...]:
    return tuple(ApiColumn(f"{name}_s", name.replace("_", " "), ApiType.NUMBER) for name in names)


def _numbers(**names: str) -> tuple[ApiColumn, ...]:
    return tuple(ApiColumn(selector, name, ApiType.NUMBER) for selector, name in names.items())


def _texts(**names: str) -> tuple[ApiColumn, ...]:
    return tuple(ApiColumn(selector, name) for selector, name in names.items())


_IDENTITY = (
    ApiColumn("started_at", "began", ApiType.TIMESTAMP),
    *_texts(request_id="request", trace_id="trace"),
    *_texts(engine="engine", model="model", tenant="tenant"),
    *_texts(verdict="verdict", status="status", cause="cause"),
)
_FIGURES = (
    *_seconds("ttft", "tpot", "e2e", "queue", "prefill", "decode", "max_gap"),
    *_numbers(input_tokens="input", cached_tokens="cached", output_tokens="output"),
)
_DETAILS = (
    *_texts(finish_reason="finish", error="error", session="session", end_user="user"),
    *_texts(workload="workload", route="route", vantage="vantage", prefill_engine="prefill engine"),
    *_numbers(http_status="HTTP", preemptions="preemptions", cost_usd="cost"),
    *_numbers(
        reasoning_tokens="reasoning", first_visible_s="first visible", holdback_s="held back"
    ),
)
_PHASES = (
    *_seconds("queue", "prefill", "decode"),
    *_numbers(front_s="front", rest_s="rest"),
)


def _choosing(title: str, variable: str) -> Link:
    """This dashboard with the clicked value as this variable, and the others as they are."""
    prefix = OF_API.prefix
    names = (*CHOSEN, "sort", "request")
    others = ("datasource", *(f"{prefix}{name}" for name in names if name != variable))
    kept = "".join(f"&${{{name}:queryparam}}" for name in others)
    return Link(title, OF_API.url(**{variable: "${__value.raw}"}) + kept)


_ENGINE = Link(
    "The engine",
    f"/d/{DashboardUid.OPERATIONS}?${{__url_time_range}}&var-engine=${{__value.raw}}",
)
_IN_FULL = _choosing("This request in full", "request")
_COLUMNS = (
    Column(name="request", unit=PanelUnit.TEXT, links=(_IN_FULL,)),
    Column(name="trace", unit=PanelUnit.TEXT, links=(_IN_FULL,)),
    Column(
        name="engine", unit=PanelUnit.TEXT, links=(_ENGINE, _choosing("Only this engine", "engine"))
    ),
    Column(name="model", unit=PanelUnit.TEXT, links=(_choosing("Only this model", "model"),)),
    Column(name="tenant", unit=PanelUnit.TEXT, links=(_choosing("Only this tenant", "tenant"),)),
    Column(name="began", unit=PanelUnit.DATE),
    *(
        Column(name=name, unit=PanelUnit.SECONDS)
        for name in ("ttft", "tpot", "e2e", "queue", "prefill", "decode", "max gap")
    ),
)


def _requests(columns: tuple[ApiColumn, ...], **params: str) -> Api:
    return Api("/api/v1/requests", params, "items", columns)


def _list(title: str, description: str, params: Mapping[str, str]) -> Panel:
    chosen = {**_SELECTION, **_STARTED, **params, "limit": "50"}
    return Panel(
        title,
        description,
        PanelUnit.NUMBER,
        (_requests(_IDENTITY + _FIGURES, **chosen),),
        style=TABLE,
        width=24,
        height=10,
        columns=_COLUMNS,
    )


_WORST = (
    _list(
        "Worst requests",
        "Of the time shown, by the measure chosen above. Empty fields choose everything. A click "
        "on a request shows it in full; on an engine, a model or a tenant it can be chosen.",
        {"sort": f"${{{OF_API.prefix}sort}}"},
    ),
    _list(
        "Newest requests that missed",
        "Of the time shown, with the cause of each as soon as it is known.",
        {"verdict": "missed"},
    ),
)

_CHOSEN_ONE = {"id": f"${{{OF_API.prefix}request}}", "limit": "1"}
_ONE = (
    Panel(
        "The request",
        "The request chosen above: write one of its ids or its trace id, or click on one in a "
        "table. Without an id it is the newest of all.",
        PanelUnit.NUMBER,
        (_requests(_IDENTITY + _FIGURES + _DETAILS, **_CHOSEN_ONE),),
        style=TABLE,
        width=14,
        height=7,
        columns=(
            *_COLUMNS,
            Column(name="cost", unit=PanelUnit.DOLLARS),
            Column(name="first visible", unit=PanelUnit.SECONDS),
            Column(name="held back", unit=PanelUnit.SECONDS),
        ),
    ),
    Panel(
        "Phases of the request",
        "Where the time of the request chosen above went. The front is what it took beside queue "
        "and prefill to the first token; the rest is after the last one.",
        PanelUnit.SECONDS,
        (_requests(_PHASES, **_CHOSEN_ONE),),
        style=replace(
            BARS,
            options={**BARS.options, "reduceOptions": {"calcs": ["lastNotNull"], "fields": ""}},
        ),
        width=10,
        height=7,
        lowest=None,
    ),
)


def _breakdown(title: str, description: str, by: str) -> Panel:
    columns = (
        ApiColumn("group", by.replace("_", " ")),
        *_numbers(requests="requests", met="met", missed="missed", attainment="attainment"),
        *(
            ApiColumn(f"{name}_ms.p95", f"{name} p95", ApiType.NUMBER)
            for name in ("ttft", "tpot", "e2e", "queue")
        ),
        *_numbers(input_tokens="input", output_tokens="output"),
    )
    return Panel(
        title,
        f"{description} Attainment is that of the objective chosen above; without one it is empty "
        "if several objectives judge the requests.",
        PanelUnit.NUMBER,
        (Api("/api/v1/breakdown", {**_SELECTION, **_WINDOW, "by": by}, "groups", columns),),
        style=TABLE,
        width=12,
        columns=(
            Column(name="attainment", unit=PanelUnit.SHARE),
            *(
                Column(name=f"{name} p95", unit=PanelUnit.MILLISECONDS)
                for name in ("ttft", "tpot", "e2e", "queue")
            ),
        ),
    )


_LOST = (
    _breakdown("By tenant", "Tenants are known by the plugin or the proxy.", "tenant"),
    _breakdown("By input length", "Tokens of the prompt.", "input_length"),
    _breakdown("By engine", "One engine far below the others is one in trouble.", "engine"),
    Panel(
        "Causes of misses",
        "Seconds beyond the limits, by cause, the requests of which it is the first cause, and "
        "what to change.",
        PanelUnit.NUMBER,
        (
            Api(
                "/api/v1/summary",
                {**_SELECTION, **_WINDOW},
                "cause_details",
                (
                    ApiColumn("cause", "cause"),
                    *_numbers(share="share", seconds="excess", requests="requests"),
                    ApiColumn("advice.text", "what to change"),
                ),
            ),
        ),
        style=TABLE,
        width=12,
        columns=(
            Column(name="share", unit=PanelUnit.SHARE),
            Column(name="excess", unit=PanelUnit.SECONDS),
        ),
    ),
)

_CONVERSATIONS = (
    Panel(
        "Conversations by turn",
        "Turns of sessions that began in the time shown, numbered from its begin. Sessions are "
        "known by the plugin or the proxy.",
        PanelUnit.NUMBER,
        (
            Api(
                "/api/v1/conversations",
                {**_SELECTION, **_WINDOW},
                "by_turn",
                (
                    ApiColumn("bucket", "turn"),
                    *_numbers(turns="turns", ttft_p50_s="TTFT p50", ttft_p95_s="TTFT p95"),
                    *_numbers(cached_ratio="cached", gap_p50_s="gap p50"),
                    *_numbers(evicted_tokens="evicted", moved_tokens="moved"),
                ),
            ),
        ),
        style=TABLE,
        width=24,
        columns=(
            *(
                Column(name=name, unit=PanelUnit.SECONDS)
                for name in ("TTFT p50", "TTFT p95", "gap p50")
            ),
            Column(name="cached", unit=PanelUnit.SHARE),
        ),
    ),
)

_EVENTS = (
    Panel(
        "Events of engines",
        "Of the time shown, the newest first: starts, crashes, Xids and so on.",
        PanelUnit.NUMBER,
        (
            Api(
                "/api/v1/events",
                {"engine": _SELECTION["engine"], **_WINDOW},
                "items",
                (
                    ApiColumn("at", "at", ApiType.TIMESTAMP),
                    *_texts(engine="engine", gpu="GPU", kind="kind", confidence="confidence"),
                ),
            ),
        ),
        style=TABLE,
        width=24,
        columns=(
            Column(name="at", unit=PanelUnit.DATE),
            Column(name="engine", unit=PanelUnit.TEXT, links=(_ENGINE,)),
        ),
    ),
)

API_ROWS = (
    PanelRow("The worst requests", _WORST),
    PanelRow("One request", _ONE),
    PanelRow("Where attainment is lost", _LOST),
    PanelRow("Conversations", _CONVERSATIONS),
    PanelRow("Events", _EVENTS),
)
