"""An audit reads well on a terminal, and is JSON for a program."""

import json
from io import StringIO

from rich.console import Console

from agent.analysis.audit import CHECKS, audit
from agent.analysis.setup_steps import SetupAction, SetupStep, StepName
from agent.catalog import engine_facts as fact
from agent.outputs.audit import audit_json, print_audit
from agent.records.audit import AgentEvidence, AuditEvidence, EvidencePart, LatencyLimits
from tests.analysis.audit.evidence import (
    command_line,
    engine,
    evidence,
    trial,
    with_engine,
    with_facts,
)


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
        trial=trial(lead_s=None),
        gpus=None,
        unread={EvidencePart.GPUS: "no GPU can be read: no_library"},
    )


def printed_audit(of: AuditEvidence, width: int) -> str:
    file = StringIO()
    print_audit(of, audit(of), Console(file=file, width=width, highlight=False))
    return file.getvalue()


def test_every_line_has_its_finding_and_a_bad_one_its_reason_and_change() -> None:
    of = badly_started()
    text = " ".join(printed_audit(of, 500).split())
    assert text.startswith("http://127.0.0.1:8000: vllm 0.31.0, model tiny-llama KV cache ")
    seen = set()
    for line in audit(of):
        result = line.result
        if result.seen in seen:
            # A reason is printed once.
            assert f" unknown {line.check.name} see " in text
            continue
        seen |= {result.seen} if result.finding == "unknown" else set()
        shown = [f"{result.finding} {line.check.name} {result.seen}"]
        shown += [f"why: {line.check.why}"] if result.finding in ("warn", "fail") else []
        shown += [f"change: {result.change}"] if result.change else []
        assert " ".join(shown) in text
    assert text.endswith(" unknown")


def test_lines_that_are_unknown_for_one_reason_name_the_first_of_them() -> None:
    text = " ".join(printed_audit(badly_started(), 500).split())
    assert text.count("no GPU can be read: no_library") == 1
    assert "unknown memory errors see parallelism" in text


def test_an_engine_without_statistics_is_known_by_its_command_line() -> None:
    of = evidence(engine=engine(sample=None), command_line=command_line(disable_log_stats=""))
    assert printed_audit(of, 80).startswith("http://127.0.0.1:8000: vllm 0.33.0,")
    unknown = evidence(engine=engine(sample=None), command_line=None)
    assert printed_audit(unknown, 80).startswith("http://127.0.0.1:8000: an engine 0.33.0,")


STEP = SetupStep(
    name=StepName.SPANS,
    state="missing",
    shows="a row for each request",
    actions=(SetupAction("restart vLLM with", (f"vllm serve {'long-' * 40}",)),),
)
DONE = SetupStep(name=StepName.METRICS, state="done", shows="load")


def test_only_lines_to_paste_are_wider_than_the_terminal() -> None:
    of, file = badly_started(), StringIO()
    assert max(map(len, printed_audit(of, 80).splitlines())) <= 80
    print_audit(of, audit(of), Console(file=file, width=80, highlight=False), (DONE, STEP))
    printed = file.getvalue().splitlines()
    assert f"    {STEP.actions[0].lines[0]}" in printed
    assert printed[printed.index("Setup") + 1] == "done: metrics"
    assert printed[-1].endswith(" unknown")


def test_an_engine_cannot_steer_the_printed_audit() -> None:
    text = printed_audit(with_engine(models=("tiny\x1b[2J[bold]llama",), version="1\x07"), 80)
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "[bold]llama" in text


def test_the_json_has_every_line() -> None:
    of = badly_started()
    found = json.loads(audit_json(of, audit(of), [STEP]))
    (step,) = found["setup"]
    assert (step["name"], step["state"], step["shows"]) == ("spans", "missing", STEP.shows)
    (action,) = step["actions"]
    assert action == {"where": "restart vLLM with", "lines": [*STEP.actions[0].lines]}
    assert [line["check"] for line in found["lines"]] == [check.name for check in CHECKS]
    assert sum(found["counts"].values()) == len(CHECKS)
    (first,) = (line for line in found["lines"] if line["check"] == "prefix caching")
    assert (first["area"], first["finding"], first["seen"]) == ("KV cache", "fail", "off")
    assert (first["why"], first["change"]) == (CHECKS[0].why, "remove --no-enable-prefix-caching")
    assert found["engine"] == "http://127.0.0.1:8000"
