"""Audits as text, kept in files beside this one. Run as a module, it writes them anew."""

from io import StringIO
from pathlib import Path

from rich.console import Console

from agent.analysis.audit.auditing import audit
from agent.catalog import engine_facts as fact
from agent.outputs.audit import print_audit
from agent.records.audit import AgentEvidence, AuditEvidence, EvidencePart, LatencyLimits
from tests.analysis.audit.evidence import command_line, engine, evidence, trial, with_facts

FOLDER = Path(__file__).parent
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


AUDITS = {"well": evidence, "badly": badly_started}


def terminal(of: AuditEvidence, width: int) -> str:
    """What is printed on a terminal of this width."""
    console = Console(file=StringIO(), width=width, highlight=False)
    print_audit(of, audit(of), console)
    file = console.file
    assert isinstance(file, StringIO)
    return "".join(f"{line.rstrip()}\n" for line in file.getvalue().splitlines())


def texts() -> dict[str, str]:
    """All texts by the names of their files."""
    return {
        f"{name}-{width}.txt": terminal(of(), width)
        for name, of in AUDITS.items()
        for width in WIDTHS
    }


if __name__ == "__main__":
    for name, text in texts().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
