"""What an agent sees of vLLM's own scheduler: runs of `scheduler_driver.py`, kept and read.

    recorded([(CHAT, ()), (CHAT, (slower(1.35),))])          # runs what is not kept yet, together
    sight = recording(CHAT, (slower(1.35),)).sight(View.PLUGIN)
    tuned = replace(CHAT, engine={**CHAT.engine, "max_num_batched_tokens": 512})
    sight = recording(tuned, (loaded(2.0),)).sight(View.PLUGIN)   # other arguments of the engine

`engine` has any of vLLM's arguments, spelled as in `EngineArgs`. A run takes some seconds. Its
recording is kept outside of the checkout, by all that it depends on.
"""

import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import StrEnum
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any

import msgspec
from goodput_agent_vllm.datagrams import HEADER, write_header
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from agent.analysis.joined_record import joined, served_row, with_figures
from agent.catalog import gpu_facts
from agent.catalog.engine_facts import MAX_RUNNING_REQUESTS, MAX_STEP_TOKENS
from agent.catalog.engines import DIALECTS
from agent.records.engine import (
    EndedRequest,
    EngineIdentity,
    EngineProcess,
    EngineSample,
    HostSample,
    ProcessRole,
    ServedRequest,
)
from agent.records.gpu import FactKey, GpuSample
from agent.records.request import ProxyView, RequestRecord, Vantage
from agent.sources.engines.exposition import read_exposition
from agent.sources.engines.translate import translate, wanted_series
from agent.sources.otlp.span_reader import SpanReader
from agent.sources.plugin_records import PluginRecords, read_datagram
from tests.analysis.causes.fault_runs import Sight
from tests.analysis.causes.scheduler_scenarios import (
    FACTOR_FROM_S,
    FACTOR_UNTIL_S,
    Factor,
    Json,
    Scenario,
)
from tests.real_parts.tiny_model import INSTALLER, engine_command, engine_python, tiny_model

ENGINE, MODEL = "scheduled-0", "scheduled-chat"
# The default of an agent.
SCRAPED_EVERY_S = 5.0
# Another one for GPUs.
_GPU_EVERY_S = 1.0
_CLOCK_HZ = 1.98e9
_NETWORK_S = 0.002
_RECORDS = 50_000
_DRIVER = Path(__file__).with_name("scheduler_driver.py")
_PLUGIN = Path(__file__).parents[3] / "plugins" / "vllm"
_AT_ONCE = 2

_Factors = tuple[Factor, ...]


class View(StrEnum):
    """What an agent is given, from the least on. All views have samples, processors and GPUs."""

    SAMPLES = "spans and samples"
    # The plugin as it is installed: requests are measured by the middleware in vLLM's front, and
    # a step's prompt tokens come with the step that ends the prefill.
    PLUGIN = "plugin and samples"
    # With --enable-logging-iteration-details a step has its own tokens.
    DETAILS = "plugin with iteration details, and samples"
    PROXY = "plugin, proxy, spans and samples"


class Recording:
    """A run as the driver wrote it."""

    def __init__(self, scenario: Scenario, factors: _Factors, written: Json) -> None:
        self.scenario = scenario
        self.factors = factors
        self.written = written

    def sight(self, view: View) -> Sight:
        """What an agent with this view sees of it."""
        plugin = view is not View.SAMPLES
        content = self._content(view is View.DETAILS or view is View.PROXY)
        by_id = {each.request_id: each for each in content.ended}
        requests = [self._row(view, span, by_id) for span in self._spans]
        return Sight(
            requests=requests,
            ended={each.span_id: by_id[each.trace_id] for each in requests} if plugin else {},
            steps=content.steps if plugin else [],
            samples=self.samples,
            hosts=_hosts(self.written),
            gpus=_gpus(self.factors, self.written["began_at"], self.samples[-1].at),
            died_at=None,
        )

    @cached_property
    def samples(self) -> list[EngineSample]:
        """The exposition as the agent reads it, and the limits on the engine's command line."""
        return _samples(self)

    def _content(self, detailed: bool) -> PluginRecords:
        """The plugin's records, as its socket's reader in the agent reads them."""
        content = PluginRecords()
        records = self.written["detailed" if detailed else "default"]
        for first in range(0, len(records), _RECORDS):
            part = records[first : first + _RECORDS]
            datagram = bytearray(HEADER.size)
            write_header(datagram, run=1, records=len(part), first=first, dropped=0)
            received_at = self.written["expositions"][-1][0]
            read = read_datagram(bytes(datagram) + b"".join(part), ENGINE, received_at)
            assert read is not None
            assert not read.refused, read.refused
            content.steps += read.steps
            content.ended += read.ended
        return content

    @cached_property
    def _spans(self) -> list[RequestRecord]:
        """The engine's spans, as the agent's receiver reads them."""
        export = ExportTraceServiceRequest()
        resource = export.resource_spans.add()
        scope = resource.scope_spans.add()
        scope.scope.name = "vllm.llm_engine"
        ended_at = 0.0
        for started_at, ended_at, attributes in self.written["spans"]:
            span = scope.spans.add(name="llm_request")
            span.trace_id = bytes.fromhex(attributes["gen_ai.request.id"])
            span.span_id = span.trace_id[8:]
            span.start_time_unix_nano = round(started_at * 1e9)
            span.end_time_unix_nano = round(ended_at * 1e9)
            for key, value in attributes.items():
                kind = {int: "int_value", float: "double_value", str: "string_value"}[type(value)]
                setattr(span.attributes.add(key=key).value, kind, value)
        reader = SpanReader(lambda _: EngineIdentity(engine=ENGINE, model=MODEL), "agent")
        content = reader.read(export, ended_at)
        assert not content.rejected, content.rejected
        return [each._replace(received_at=each.ended_at) for each in content.records]

    def _row(
        self, view: View, span: RequestRecord, by_id: dict[str, EndedRequest]
    ) -> RequestRecord:
        """The request's row, with what else is known of it."""
        if view is View.SAMPLES:
            return span
        ended = by_id[span.trace_id]
        if view is View.PROXY:
            row = joined(_seen_outside(span, _NETWORK_S), span)
            return with_figures(row, [ended])
        return served_row(ServedRequest(_seen_outside(span, 0.0), (ended,)))


def _seen_outside(span: RequestRecord, network_s: float) -> RequestRecord:
    """The user's view of a request: by the middleware in the front, or across a network."""
    assert span.ttft_s is not None
    assert span.e2e_s is not None
    return RequestRecord(
        trace_id=span.trace_id,
        span_id=f"f{span.span_id[1:]}",
        vantage=Vantage.PROXY,
        status=span.status,
        started_at=span.started_at,
        ended_at=span.ended_at + network_s,
        received_at=span.ended_at + network_s,
        engine=ENGINE,
        model=MODEL,
        ttft_s=span.ttft_s + network_s,
        tpot_s=span.tpot_s,
        e2e_s=span.e2e_s + network_s,
        input_tokens=span.input_tokens,
        output_tokens=span.output_tokens,
        proxied=ProxyView(
            first_byte_s=span.ttft_s + network_s, streamed=True, choices=1, gap_tokens=1
        ),
    )


def _samples(run: Recording) -> list[EngineSample]:
    dialect = DIALECTS["vllm"]
    wanted = wanted_series([dialect])
    samples = []
    began_at = run.written["began_at"]
    engine = run.scenario.arguments(run.factors)
    for at, text in run.written["expositions"]:
        found = translate(read_exposition(text.encode(), wanted), [dialect])
        facts = dict(found.facts)
        facts[MAX_RUNNING_REQUESTS.name, ()] = _places(run, at - began_at)
        facts[MAX_STEP_TOKENS.name, ()] = float(engine["max_num_batched_tokens"])
        samples.append(
            EngineSample(
                engine=ENGINE,
                at=at,
                dialect="vllm",
                model=MODEL,
                facts=facts,
                process_started_at=began_at - 900.0,
            )
        )
    return samples


def _places(run: Recording, at_s: float) -> float:
    fewer = [strength for factor in run.factors for name, strength in factor.script
             if name == "places" and FACTOR_FROM_S <= at_s < FACTOR_UNTIL_S]  # fmt: skip
    return float(min([run.scenario.arguments(run.factors)["max_num_seqs"], *fewer]))


def _hosts(written: Json) -> list[HostSample]:
    """The run delay of the core's main thread."""
    return [
        HostSample(
            at=at,
            processes=(
                EngineProcess(
                    pid=1,
                    started_after_boot_s=1.0,
                    role=ProcessRole.CORE,
                    name="VLLM::EngineCore",
                    state="R",
                    cpu_s=ran_s,
                    cpu_wait_s=waited_s,
                    cpu_run_s=ran_s,
                ),
            ),
        )
        for at, ran_s, waited_s in written["processor"]
    ]


def _gpus(factors: _Factors, began_at: float, until: float) -> list[GpuSample]:
    """One GPU, whose clock is lower by as much as it throttles."""
    slowdown = max(
        [1.0, *(by for each in factors for name, by in each.script if name == "throttled")]
    )
    samples, throttled_s, at = [], 0.0, began_at
    while at <= until:
        throttles = slowdown > 1 and FACTOR_FROM_S <= at - began_at < FACTOR_UNTIL_S
        throttled_s += _GPU_EVERY_S if throttles else 0.0
        facts: dict[FactKey, float] = {
            (gpu_facts.CLOCK.name, ("sm",)): _CLOCK_HZ / (slowdown if throttles else 1.0),
            (gpu_facts.THROTTLED_TIME.name, ("hw_thermal",)): throttled_s,
        }
        samples.append(GpuSample(gpu="GPU-0", index=0, name="H100", at=at, facts=facts))
        at += _GPU_EVERY_S
    return samples


@lru_cache(maxsize=64)
def recording(scenario: Scenario, factors: _Factors = ()) -> Recording:
    """One run; it is run first if it is not kept."""
    (run,) = recorded([(scenario, factors)])
    return run


def recorded(wanted: Iterable[tuple[Scenario, _Factors]]) -> list[Recording]:
    """Runs, in this order. Those that are not kept yet run together in a few processes."""
    every = [(scenario, factors, _job(scenario, factors)) for scenario, factors in wanted]
    _run([job for _, _, job in every if not Path(job["to"]).exists()])
    return [
        Recording(scenario, factors, _read(Path(job["to"]))) for scenario, factors, job in every
    ]


def again(scenario: Scenario, factors: _Factors = ()) -> Json:
    """What the driver writes of a run, whether it is kept or not."""
    with tempfile.TemporaryDirectory() as folder:
        to = Path(folder) / "again.msgpack"
        _run([_job(scenario, factors) | {"to": str(to)}])
        return _read(to)


def _read(path: Path) -> Json:
    written: Json = msgspec.msgpack.decode(path.read_bytes())
    return written


def _job(scenario: Scenario, factors: _Factors) -> Json:
    job = scenario.job(factors)
    job["engine"]["model"] = str(tiny_model())
    job["scrape_every_s"] = SCRAPED_EVERY_S
    digest = hashlib.sha256(_made_by() + json.dumps(job, sort_keys=True).encode()).hexdigest()
    return job | {"to": str(_kept() / f"{digest[:32]}.msgpack")}


@cache
def _kept() -> Path:
    folder = engine_python().parents[2] / "scheduler-runs"
    folder.mkdir(exist_ok=True)
    return folder


@cache
def _made_by() -> bytes:
    """All that a run depends on beside its job: vLLM with its versions, the driver, the plugin."""
    modules = [_PLUGIN / "goodput_agent_vllm" / f"{name}.py" for name in _PLUGIN_MODULES]
    return b"\0".join(path.read_bytes() for path in (INSTALLER, _DRIVER, *modules))


_ENVIRONMENT = {
    "PYTHONPATH": str(_PLUGIN),
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    # The order of sets must be the same each time.
    "PYTHONHASHSEED": "0",
    # The model has no weights here, and so no limit of its own.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
}
# The modules of the plugin that make its records.
_PLUGIN_MODULES = ("datagrams", "hooks", "reporting")


def _run(jobs: Sequence[Json]) -> None:
    """Run these jobs, one part of them in each process."""
    unique = list({job["to"]: job for job in jobs}.values())
    parts = [part for first in range(_AT_ONCE) if (part := unique[first::_AT_ONCE])]
    environment = {**os.environ, **_ENVIRONMENT}
    with tempfile.TemporaryDirectory() as folder:
        running = []
        for number, part in enumerate(parts):
            given = Path(folder) / f"{number}.json"
            given.write_text(json.dumps({"jobs": part}))
            command = [*engine_command(_DRIVER), given]
            running.append(
                subprocess.Popen(
                    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
                )
            )
        for process in running:
            printed, _ = process.communicate()
            assert process.returncode == 0, printed.decode(errors="replace")[-4000:]


def with_engine(scenario: Scenario, **arguments: Any) -> Scenario:
    """The scenario with other arguments of the engine, spelled as in vLLM's `EngineArgs`."""
    return replace(scenario, engine={**scenario.engine, **arguments})
