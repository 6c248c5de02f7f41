"""The overview of an agent and of an engine, as text."""

import io
import json
import re
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from rich.console import Console

from agent.analysis.engine_figures import CountedEngine, engine_figures
from agent.analysis.histogram_bounds import Bounds
from agent.outputs.overview import (
    AgentFigures,
    EngineLine,
    Figure,
    GpuLine,
    LatencyLine,
    ObjectiveLine,
    Overview,
    agent_overview,
    engine_overview,
    json_values,
    renderable,
)
from agent.records.engine import EngineSample
from tests.outputs.api.test_engine_counts import counts

AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
NOTHING = Overview(
    title="http://agent:9470",
    at=AT,
    engines=[EngineLine(name="chat-0", up=None)],
    rates={"requests/s": None, "goodput/s": None},
    latencies=[LatencyLine(name="ttft", quantiles_ms={"p50": None}, limits_ms={})],
    objectives=[ObjectiveLine(name="chat", target=0.95, attainment=None)],
    gpus=[
        GpuLine(
            name="0 H100",
            utilization=None,
            memory_used=1e9,
            memory_total=None,
            power_watts=None,
            temperature_celsius=None,
        )
    ],
)


def text(overview: Overview, *, styled: bool = False) -> str:
    file = io.StringIO()
    Console(file=file, width=120, force_terminal=styled).print(renderable(overview))
    return file.getvalue()


def cells(overview: Overview, first: str) -> list[str]:
    (line,) = (line for line in text(overview).splitlines() if line.startswith(first))
    return line.removeprefix(first).split()


def test_what_is_unknown_is_a_dash_and_never_zero() -> None:
    assert cells(NOTHING, "chat-0") == ["-"] * 5
    assert cells(NOTHING, "ttft") == ["-"] * 4
    assert cells(NOTHING, "chat ") == ["-", "95", "%"]
    assert cells(NOTHING, "0 H100") == ["-"] * 4
    lines = text(replace(NOTHING, engines=[])).splitlines()
    assert lines[lines.index(next(x for x in lines if x.startswith("engine"))) + 1].startswith("-")
    rates = next(x for x in lines if x.startswith("requests/s"))
    assert lines[lines.index(rates) + 1].split() == ["-", "-"]


@pytest.mark.parametrize(
    ("figure", "shown", "colour"),
    [
        (0.0, "0", None),
        (12.345, "12.3", None),
        (201.0, "201", "31"),
        (1234.5, "1,234", "31"),
        (Bounds(40.0, 40.0), "40", None),
        (Bounds(100.0, 200.0), "100-200", None),
        (Bounds(150.0, 250.0), "150-250", "33"),
        (Bounds(150.0, None), "over 150", "33"),
        (Bounds(250.0, 500.0), "250-500", "31"),
        (None, "-", None),
    ],
)
def test_a_percentile_over_the_lowest_limit_is_red_and_one_that_may_be_is_yellow(
    figure: Figure, shown: str, colour: str | None
) -> None:
    limits_ms = {"chat": 200.0, "long": 900.0}
    line = LatencyLine(name="ttft", quantiles_ms={"p50": figure}, limits_ms=limits_ms)
    overview = replace(NOTHING, latencies=[line])
    assert " ".join(cells(overview, "ttft")) == f"{shown} - - 200 chat, 900 long"
    (row,) = (each for each in text(overview, styled=True).splitlines() if "ttft" in each)
    assert re.findall(r"\x1b\[(31|33)m", row)[:1] == ([colour] if colour else [])


SUMMARY: dict[str, Any] = {
    "requests": 0,
    "simulated": False,
    "throughput_rps": None,
    "goodput_rps": None,
    "input_tokens_per_s": None,
    "output_tokens_per_s": None,
    "ttft_ms": {"p50": None, "p95": None, "p99": None},
    "engine_counts": None,
}
CHAT = {"name": "chat", "attainment": None, "definition": {"ttft_s": 0.2, "target": 0.95}}
COUNTS = {
    "throughput_rps": 3.0,
    "goodput_rps": {"lower": 2.0, "upper": 3.0, "estimate": None},
    "input_tokens_per_s": 100.0,
    "output_tokens_per_s": 50.0,
    "latencies_ms": {
        "ttft": {
            each: {"lower": 250.0, "upper": 500.0, "estimate": 300.0}
            for each in ("p50", "p95", "p99")
        }
    },
    "attainment": [{"objective": "chat", "lower": 0.6, "upper": 0.9}],
}


def of_agent(**summary: Any) -> Overview:
    found = AgentFigures(
        summary=SUMMARY | summary, objectives=[CHAT], engines=[], gpus=[], events=[]
    )
    return agent_overview("http://agent:9470", AT, found)


def test_without_rows_figures_are_those_that_engines_counted() -> None:
    overview = of_agent(engine_counts=COUNTS)
    assert overview.rates["requests/s"] == 3.0
    assert overview.rates["goodput/s"] == Bounds(2.0, 3.0, None)
    assert cells(overview, "ttft") == ["250-500"] * 3 + ["200", "chat"]
    assert cells(overview, "chat ")[:2] == ["60-90", "%"]
    assert "figures are of the engines' counters" in text(overview)
    values = json.loads(json.dumps(json_values(overview)))
    assert values["rates"]["goodput/s"] == {"lower": 2.0, "upper": 3.0, "estimate": None}
    assert values["at"] == "2026-01-02T03:04:05+00:00"
    # Rows win over counts.
    ttft = {"p50": 100.0, "p95": 150.0, "p99": 180.0}
    overview = of_agent(engine_counts=COUNTS, requests=20, throughput_rps=2.5, ttft_ms=ttft)
    assert overview.rates["requests/s"] == 2.5
    assert cells(overview, "ttft")[:3] == ["100", "150", "180"]
    assert "counters" not in text(overview)


def test_what_an_idle_agent_or_one_of_another_version_does_not_say_is_unknown() -> None:
    idle, engines = of_agent(), [{"name": "chat-0", "up": True}]
    assert (set(idle.rates.values()), idle.latencies) == ({None}, [])
    older = AgentFigures(
        summary={"requests": 0}, objectives=[], engines=engines, gpus=[], events=[]
    )
    overview = agent_overview("http://agent:9470", AT, older)
    assert overview.engines == [EngineLine(name="chat-0", up=True)]
    assert set(overview.rates.values()) == {None}


def test_an_engine_alone_has_what_its_metrics_give() -> None:
    sample = EngineSample(engine="x", at=AT.timestamp(), dialect="vllm", model="llama", facts={})
    found = engine_figures([CountedEngine(model="llama", counts=counts())], ())
    overview = engine_overview("http://engine:8000", sample, found)
    assert overview.rates["requests/s"] == 3.0
    assert overview.rates["goodput/s"] is None
    assert cells(overview, "ttft")[0] == "0-500"
    assert cells(overview, "vllm")[1:4] == ["-", "-", "-"]
    after_one_read = engine_overview("http://engine:8000", sample, None)
    assert set(after_one_read.rates.values()) == {None}
