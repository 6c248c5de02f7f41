"""Each check turns as its evidence does, and never says more than the evidence holds."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from agent.analysis.audit import CHECKS, audit, counts
from agent.analysis.audit.checks import AuditFinding
from agent.analysis.audit.traffic_checks import SMALLEST_STEP
from agent.catalog import engine_facts as fact
from agent.catalog.hardware import Precision, gpu_models
from agent.catalog.security_notices import NOTICES
from tests.analysis.audit.cases import CASES, OTHER_ENGINES
from tests.analysis.audit.deployments import AuditCase
from tests.analysis.audit.evidence import (
    LENGTH_EDGES,
    STEP_EDGES,
    engine,
    evidence,
    histogram,
    result,
    watched,
    with_engine,
    with_facts,
)

PASS, WARN, FAIL, UNKNOWN = AuditFinding

# Checks that always know.
NEVER_UNKNOWN = {"statistics", "health"}


@pytest.mark.parametrize(
    ("check", "case"),
    [(check, case) for each in (CASES, OTHER_ENGINES) for check in each for case in each[check]],
)
def test_a_check_turns_as_its_evidence_does(check: str, case: AuditCase) -> None:
    found = result(check, case.of)
    assert (found.finding, case.seen in found.seen) == (case.finding, True), found
    assert (case.change or "") in (found.change or "")


@pytest.mark.parametrize("check", OTHER_ENGINES)
def test_the_advice_for_another_engine_names_nothing_of_vllm(check: str) -> None:
    for case in OTHER_ENGINES[check]:
        change = result(check, case.of).change or ""
        assert "vLLM" not in change
        assert "--" not in change


def test_a_gpu_computes_the_smallest_step_no_faster_than_it_reads_the_weights() -> None:
    per_byte = [
        flops / gpu.bandwidth_bytes_per_s
        for gpu in gpu_models()
        for precision, flops in gpu.peak_flops_per_s.items()
        if precision in (Precision.BF16, Precision.FP16)
    ]
    assert max(per_byte) < SMALLEST_STEP


def test_every_check_is_seen_to_turn() -> None:
    assert CASES.keys() == {check.name for check in CHECKS}
    for name, cases in CASES.items():
        assert {case.finding for case in cases} & {WARN, FAIL}, name


def test_a_good_deployment_passes_every_check() -> None:
    lines = audit(evidence())
    assert [line for line in lines if line.result.finding is not PASS] == []
    assert counts(lines) == {PASS: len(CHECKS), WARN: 0, FAIL: 0, UNKNOWN: 0}
    assert len({line.check.name for line in lines}) == len(CHECKS)


def test_nothing_passes_without_evidence() -> None:
    of = evidence(
        engine=engine(
            sample=None, cache_config={}, answered=None, input_lengths=None, output_lengths=None,
            step_tokens=None, version=None, models=(), max_model_len=None, health=None,
            needs_key=None, date_lead_s=None,
        ),
        command_line=None, addresses=None, pids=frozenset(), gpus=None, model=None, agent=None,
        trial=None,
    )  # fmt: skip
    findings = {line.check.name: line.result.finding for line in audit(of)}
    assert {name for name, found in findings.items() if found is FAIL} == NEVER_UNKNOWN
    assert set(findings.values()) == {FAIL, UNKNOWN}


LIMIT = 256
REQUESTS = st.lists(
    st.tuples(st.integers(1, 255), st.integers(1, 255), st.booleans()), min_size=1, max_size=30
)


@given(REQUESTS)
def test_lengths_of_histograms_never_hide_a_request_that_was_cut(
    asked: list[tuple[int, int, bool]],
) -> None:
    """Requests as the engine would end them: by its limit, by the client's, or by a stop token."""
    ended = [
        (given_tokens, min(made, LIMIT - given_tokens), made > LIMIT - given_tokens or by_client)
        for given_tokens, made, by_client in asked
    ]
    edges = [edge for edge in LENGTH_EDGES if edge <= LIMIT]
    cut = float(sum(by_length for *_, by_length in ended))
    base = with_facts(
        {
            (fact.REQUESTS_FINISHED, ("length",)): cut,
            (fact.REQUESTS_FINISHED, ("stop",)): len(ended) - cut,
        }
    )
    of = evidence(
        agent=None,
        engine=engine(
            sample=base.engine.sample,
            max_model_len=LIMIT,
            input_lengths=histogram([each[0] for each in ended], edges),
            output_lengths=histogram([each[1] for each in ended], edges),
        ),
    )
    reached = any(a + b >= LIMIT and by_length for a, b, by_length in ended)
    found = result("--max-model-len", of).finding
    assert not (found is PASS and reached)
    assert found is not FAIL or cut


@given(st.lists(st.lists(st.integers(1, 300), min_size=1, max_size=40), min_size=1, max_size=20))
def test_a_batch_is_never_called_smaller_than_it_was(steps: list[list[int]]) -> None:
    """Each step computes some tokens of each request in it."""
    tokens = [float(sum(step)) for step in steps] * 1000
    found = result("--max-num-seqs", with_engine(step_tokens=histogram(tokens, STEP_EDGES)))
    if found.finding is WARN:
        most = int(found.seen.split("never over ")[1].split(" in")[0].replace(",", ""))
        assert max(len(step) for step in steps) <= most


def test_clients_that_change_their_mind_seldom_seem_to_obey_a_time_out() -> None:
    drawn = random.Random(20)
    left = [[drawn.expovariate(1 / 15) for _ in range(25)] for _ in range(400)]
    found = [result("client time-outs", evidence(agent=watched(*each))).finding for each in left]
    assert found.count(WARN) == 0


@given(st.floats(1, 600), st.lists(st.floats(0, 0.1), min_size=5, max_size=30))
def test_a_time_out_is_found_however_long_the_way_to_the_engine(
    time_out_s: float, ways_s: list[float]
) -> None:
    found = evidence(agent=watched(*(time_out_s + each for each in ways_s)))
    assert result("client time-outs", found).finding is WARN


VERSIONS = (
    "0.8.2", "0.8.3", "0.8.5", "0.8.5.post1", "0.10.1.1", "0.10.2", "0.11.0rc1", "0.11.0",
    "0.14.0", "0.14.1", "0.18.0", "0.19.1", "0.22.0rc1", "0.22.0", "0.23.0", "0.24.0", "0.29.0",
    "0.30.0", "0.31.0", "0.32.0", "0.33.0", "0.33.1.dev4+g1234",
)  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_notices_concern_the_versions_of_their_ranges(version: str) -> None:
    """The ranges as pip reads them."""
    concerned = {
        notice.advisory
        for notice in NOTICES
        if SpecifierSet(
            f"{'' if notice.introduced is None else f'>={notice.introduced},'}<{notice.fixed}"
        ).contains(Version(version), prereleases=True)
        # Of a version before the fixed one's release, pip's `<` says no; it is affected.
        or (
            Version(version).release == Version(notice.fixed).release
            and Version(version).is_prerelease
        )
    }
    found = result("security notices", with_engine(version=version))
    assert {each.advisory for each in NOTICES if each.advisory in found.seen} == concerned
    assert (found.finding is PASS) == (not concerned)
