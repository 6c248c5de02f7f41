"""Which steps computed a prompt, if the engine counts all of its tokens in the last of them."""

import pytest

from agent.analysis.causes import EngineTimeline
from agent.analysis.causes.activity import Slice
from agent.analysis.causes.open_steps import OpenSteps
from agent.analysis.causes.step_costs import Costs
from tests.analysis.causes.making import AT, row, sample, step

COSTS = Costs(
    step_s=0.01, token_s=0.0, prompt_token_s=0.0002, prompt_s=0.0, large_token_s=0.0, product_s=0.0
)
BUDGET = 2000.0


def took(prompt_tokens: float) -> float:
    """The seconds of a step with so many tokens of prompts."""
    return COSTS.step_s + prompt_tokens * COSTS.prompt_token_s


def counted(*steps: tuple[float, float]) -> list[Slice]:
    """Steps with what the engine counted in them, and what they computed."""
    made, until = list[Slice](), 0.0
    for told, computed in steps:
        until += took(computed)
        made.append(
            Slice(until - took(computed), until, 1, told, 0, 1, 0, 0, 0.1, 0, took(computed))
        )
    return made


def certain(*steps: tuple[float, float]) -> list[Slice]:
    """What is certain of steps in the end: a short one closes those before it."""
    known = OpenSteps()
    found = [each for done in counted(*steps, (0, 0)) for each in known.add(done, BUDGET, COSTS)]
    assert [each.counted for each in found] == counted(*steps, (0, 0))
    return [each.done for each in found][:-1]


@pytest.mark.parametrize(
    "steps",
    [
        [(0, 2000), (0, 2000), (4700, 700)],
        [(0, 0), (900, 900), (0, 0), (700, 700)],
        # One after another: each begins in the step in which the one before ends.
        [(0, 2000), (2500, 2000), (2700, 2000), (800, 0)],
        [(300, 2000), (1900, 200)],
    ],
    ids=["a long one", "short ones", "several long ones", "one that would fit into a step"],
)
def test_prompts_are_in_the_steps_that_had_time_for_them(steps: list[tuple[float, float]]) -> None:
    for done, (_, computed) in zip(certain(*steps), steps, strict=True):
        assert done.prefill_tokens == pytest.approx(computed, abs=0.2 * BUDGET)
    assert sum(done.prefill_tokens for done in certain(*steps)) == sum(told for told, _ in steps)


def test_what_attention_takes_is_no_piece_of_the_next_prompt() -> None:
    """The last 1,500 tokens of 5,500 take as long as 2,000 of a short prompt."""
    costs, known = COSTS._replace(product_s=1.5e-8), OpenSteps()
    sizes = [(0, 2000, 0), (0, 2000, 2000), (5500, 1500, 4000), (0, 2000, 0), (2700, 700, 2000)]
    found = []
    for number, (told, computed, before) in enumerate([*sizes, (0, 0, 0)]):
        took_s = took(computed) + computed * (before + computed / 2) * costs.product_s
        made = Slice(number, number + 1, 1, told, 0, 1, 0, 0, 0.1, 0, took_s)
        found += known.add(made, BUDGET, costs)
    assert [each.done.prefill_tokens for each in found] == [2000, 2000, 1500, 2000, 700, 0]


def test_a_step_may_be_a_little_quicker_than_usual() -> None:
    stood_still, prompt = counted((0, 2000), (1900, 1900))
    known, took_s = OpenSteps(), 0.95 * took(1900)
    known.add(stood_still, BUDGET, COSTS)
    (found,) = known.add(prompt._replace(busy_s=took_s), BUDGET, COSTS)
    assert found.done.prefill_tokens == 0


def test_each_token_is_multiplied_by_those_before_it() -> None:
    first, second, third = certain((0, 2000), (0, 2000), (5000, 1000))
    products = first.products, second.products, third.products
    assert products == (2000 * 1000, 2000 * 3000, 1000 * 4500)


def test_steps_without_an_end_are_certain_in_the_end() -> None:
    known = OpenSteps()
    found = [
        each for done in counted(*[(0, 2000)] * 600) for each in known.add(done, BUDGET, COSTS)
    ]
    assert len(found) == 600 - 512


def test_own_tokens_go_on_with_the_prompt_of_a_full_step() -> None:
    known = OpenSteps()
    steps = counted((2000, 2000), (1000, 1000), (500, 500))
    products = [known.continued(done, BUDGET).products for done in steps]
    assert products == [2000 * 1000, 1000 * 2500, 500 * 250]


def timeline_of(stall_s: float) -> EngineTimeline:
    """An engine that computes a prompt of 5,900 tokens each second, in three steps and without
    iteration details, and whose newest prompt's second step stood still."""
    timeline = EngineTimeline()
    for second in range(61):
        timeline.sample(sample(AT + second, step_budget=BUDGET))
        timeline.request(row(AT + second - 2))
        until = AT + second
        for number in range(8):
            computed = BUDGET if number in (3, 4, 5) else 0
            stalled_s = stall_s if (second, number) == (60, 4) else 0.0
            until += took(computed) / 2 + stalled_s
            told = 5900 if number == 5 else 0
            made = step(until, took(computed) / 2 + stalled_s, told)
            timeline.step(made._replace(tokens_of_step=False))
    return timeline


def test_a_period_has_the_tokens_that_its_steps_computed() -> None:
    found = timeline_of(0.0).period(AT + 30, AT + 30.22).activity
    assert found.prefill_tokens == pytest.approx(2000, rel=0.05)


@pytest.mark.parametrize("stall_s", [0.0, 0.9])
def test_a_step_of_a_long_prompt_that_stood_still_is_found(stall_s: float) -> None:
    stalls = list(timeline_of(stall_s).stalled(AT, AT + 70))
    assert [round(stall.lost_s, 1) for stall in stalls] == ([stall_s] if stall_s else [])
