"""Recorded texts of a report, an audit and a comparison; run as a module, it records them anew."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from rich.console import Console

from agent.analysis.audit.auditing import audit
from agent.analysis.comparison.comparing import Comparison, compare
from agent.analysis.comparison.run_columns import MinuteColumns, RunColumns
from agent.catalog import engine_facts as fact
from agent.outputs.audit import print_audit
from agent.outputs.comparison import markdown, print_comparison
from agent.outputs.report.document import document_of
from agent.outputs.report.formats import text
from agent.records.audit import AgentEvidence, AuditEvidence, EvidencePart, LatencyLimits
from tests.analysis.audit.evidence import command_line, engine, evidence, trial, with_facts
from tests.analysis.comparison.queue_runs import QueuedRun
from tests.outputs.api.serving import open_api
from tests.outputs.report.reported import figures, filled

FOLDER = Path(__file__).parent / "recorded"
# The recorded width is the first.
WIDTHS = (80, 200)


def badly_started() -> AuditEvidence:
    """A deployment with much to change, and something unknown."""
    sample = with_facts(
        {
            (fact.PREEMPTIONS, ()): 41.0,
            (fact.KV_CAPACITY_TOKENS, ()): 10_000.0,
            (fact.REQUESTS_WAITING, ()): 12.0,
        }
    ).engine.sample
    return evidence(
        engine=engine(
            sample=sample,
            cache_config={"enable_prefix_caching": "False", "gpu_memory_utilization": "0.5"},
            version="0.31.0",
            needs_key=False,
            answered={"2xx": 900.0, "4xx": 40.0},
        ),
        limits=LatencyLimits(ttft_s=(0.2,), tpot_s=(0.12,)),
        command_line=command_line(otlp_traces_endpoint="", enforce_eager=""),
        agent=AgentEvidence(),
        trial=trial(span_lead_s=None),
        gpus=None,
        unread={EvidencePart.GPUS: "no GPU can be read: no_library"},
    )


def printed_audit(of: AuditEvidence, width: int) -> str:
    """An audit on a terminal of this width."""
    console = _console(width)
    print_audit(of, audit(of), console)
    return _lines(console)


def _run(name: str, seed: int, servers: int) -> RunColumns:
    """A run with all that a database knows; fewer servers use their GPUs less."""
    run = QueuedRun(seed=seed, servers=servers, length_s=1200.0, rate=1.0, mean_s=3.0).run()
    random, used = np.random.default_rng(seed), servers / 8
    varying = {
        column: value * random.normal(1, 0.05, 20)
        for column, value in (("flops", 40.0 * used), ("moved_bytes", 60.0 * used))
    }
    constant = {
        column: np.full(20, value)
        for column, value in (
            *(("possible_flops", 100.0), ("possible_bytes", 100.0), ("bill_usd", 0.05)),
            *(("output_tokens", 1920.0), ("good_tokens", 1500.0)),
        )
    }
    at_s = np.arange(20) * run.length_s / 20
    return replace(
        run,
        name=name,
        minutes=MinuteColumns(at_s=at_s, **varying, **constant),
        events={},
        causes={"sequence_cap": round(run.requests * (1 - used)), "burst": 12},
    )


@cache
def worse() -> Comparison:
    """Half as many servers."""
    return compare(_run("2026-11-20T10:00/20m", 1, 8), _run("2026-11-21T10:00/20m", 2, 4))


@cache
def other_load() -> Comparison:
    """More requests."""
    after = QueuedRun(seed=2, rate=6.0).run()
    return compare(QueuedRun(seed=1).run(), replace(after, name="more | requests"))


def printed_comparison(comparison: Comparison, width: int) -> str:
    """A comparison on a terminal of this width."""
    console = _console(width)
    print_comparison(comparison, console)
    return _lines(console)


def _console(width: int) -> Console:
    return Console(file=StringIO(), width=width, highlight=False)


def _lines(console: Console) -> str:
    file = console.file
    assert isinstance(file, StringIO)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def comparisons() -> Mapping[str, str]:
    """The texts of a comparison by file."""
    return {
        "comparison.txt": printed_comparison(worse(), WIDTHS[0]),
        "comparison.md": markdown(worse()),
    }


def _report() -> str:
    with TemporaryDirectory() as folder, open_api(Path(folder)) as api:
        filled(api)
        return text(document_of(figures(api)), WIDTHS[0])


def recorded(name: str) -> str:
    """The recorded text of a file."""
    return (FOLDER / name).read_text("utf-8")


def record() -> None:
    """Write every file."""
    texts = {
        **comparisons(),
        "audit.txt": printed_audit(badly_started(), WIDTHS[0]),
        "report.txt": _report(),
    }
    for name, made in texts.items():
        (FOLDER / name).write_text(made, encoding="utf-8")


if __name__ == "__main__":
    record()
