"""The bench on vLLM's own scheduler: it is vLLM's, and how often the named cause is true there."""

import pytest

from agent.catalog import engine_facts as fact
from tests.analysis.causes.scheduler_matrix import limits
from tests.analysis.causes.scheduler_runs import View, again, recording, with_engine
from tests.analysis.causes.scheduler_scenarios import CHAT, DRAFTING, PREFIXES_CHANGED, blocks_taken
from tests.analysis.causes.scheduler_scenarios import FACTOR_FROM_S as FROM_S
from tests.analysis.causes.scheduler_scenarios import FACTOR_UNTIL_S as UNTIL_S

pytestmark = pytest.mark.slow


def test_a_kept_run_is_what_the_engine_does_now() -> None:
    assert again(CHAT) == recording(CHAT).written


def test_its_steps_keep_the_engines_arguments() -> None:
    usual = recording(CHAT).sight(View.DETAILS).steps
    assert max(step.prefill_tokens + step.decode_tokens for step in usual) > 512
    fewer = recording(with_engine(CHAT, max_num_batched_tokens=512)).sight(View.DETAILS).steps
    assert max(step.prefill_tokens + step.decode_tokens for step in fewer) <= 512


def test_its_prefix_cache_has_the_prompts_of_tenants_until_they_change() -> None:
    sight = recording(CHAT, (PREFIXES_CHANGED,)).sight(View.PLUGIN)
    began_at = sight.samples[0].at
    shares: dict[bool, list[float]] = {False: [], True: []}
    for record in sight.requests:
        at_s = record.started_at - began_at
        if at_s > 30 and record.cached_tokens is not None and record.input_tokens:
            changed = FROM_S < at_s < UNTIL_S
            shares[changed].append(record.cached_tokens / record.input_tokens)
    assert sum(shares[False]) / len(shares[False]) > 0.5
    assert sum(shares[True]) / len(shares[True]) < 0.1


def test_it_preempts_requests_when_its_kv_cache_is_full() -> None:
    usual, short = (
        recording(CHAT, factors).sight(View.SAMPLES).samples[-1].fact(fact.PREEMPTIONS.name)
        for factors in ((), (blocks_taken(0.9),))
    )
    assert usual == 0
    assert short
    assert short > 0


def test_its_drafts_are_accepted_as_scripted() -> None:
    last = recording(DRAFTING).sight(View.SAMPLES).samples[-1]
    drafts = last.fact(fact.SPEC_DECODE_DRAFTS.name)
    accepted = last.fact(fact.SPEC_DECODE_ACCEPTED_TOKENS.name)
    assert drafts
    assert accepted
    assert accepted / drafts == pytest.approx(0.75 + 0.75**2 + 0.75**3, rel=0.05)


def test_usual_requests_meet_the_limits() -> None:
    objective = limits(CHAT)
    requests = recording(CHAT).sight(View.PROXY).requests
    met = sum((record.ttft_s or 0) <= (objective.ttft_s or 0) for record in requests)
    assert met >= 0.95 * len(requests)
