"""What steps cost is learned from the past: not from a fault that has just begun."""

from random import Random

import pytest

from agent.analysis.causes.activity import Slice
from agent.analysis.causes.stalls import Stalls
from agent.analysis.causes.step_costs import ComputedWork, Costs, StepCosts, beyond_free
from tests.analysis.causes.making import AT

TRUE = Costs(
    step_s=0.01,
    token_s=0.0003,
    prompt_token_s=0.0,
    prompt_s=0.004,
    large_token_s=0.0001,
    product_s=4e-9,
)


def work(random: Random, slow: float = 1.0, longest: int = 3000) -> ComputedWork:
    """Sixteen steps of some requests and prompts, on an engine as slow as that."""
    sizes = [random.randrange(50, longest) for _ in range(random.randrange(4))]
    large = sum(beyond_free(size, None) for size in sizes)
    products = sum(size**2 / 2 for size in sizes)
    done = ComputedWork(
        16, 16 * random.randrange(1, 30), sum(sizes), len(sizes), large, products, 0.0
    )
    return done._replace(seconds=slow * TRUE.of(done))


def learned(slow_for_s: int, slow: float) -> StepCosts:
    """Ten minutes as usual, then some seconds as slow as that."""
    costs, random = StepCosts(), Random(1)
    for second in range(600 + slow_for_s):
        costs.learn(AT + second, work(random, slow if second >= 600 else 1.0))
    return costs


def test_what_a_prompt_token_takes_is_learned_without_the_time_of_the_weights() -> None:
    found = learned(0, 1.0).costs
    assert found is not None
    assert found.step_s == pytest.approx(TRUE.step_s, rel=0.05)
    assert found.token_s == pytest.approx(TRUE.token_s, rel=0.05)
    for tokens in (500, 5000, 20_000):
        products = tokens**2 / 2
        prompt = ComputedWork(0, 0, tokens, 1, beyond_free(tokens, None), products, 0.0)
        assert found.of_prompts(prompt) == pytest.approx(TRUE.of_prompts(prompt), rel=0.3), tokens


@pytest.mark.parametrize(("product_s", "learned_s"), [(1e-8, 1e-8), (1e-7, 0.0)])
def test_what_attention_takes_is_learned_unless_it_is_too_much(
    product_s: float, learned_s: float
) -> None:
    """Of short prompts it is not told from other time, and would be far too long for long ones."""
    costs, random = StepCosts(), Random(1)
    for second in range(600):
        done = work(random, longest=12_000)
        attention_s = done.products * (product_s - TRUE.product_s)
        costs.learn(AT + second, done._replace(seconds=done.seconds + attention_s))
    assert costs.costs is not None
    assert costs.costs.product_s == pytest.approx(learned_s, rel=0.05)


@pytest.mark.parametrize(("slow_for_s", "usual"), [(50, True), (7200, False)])
def test_steps_that_became_slow_are_not_usual_until_they_last(slow_for_s: int, usual: bool) -> None:
    found, done = learned(slow_for_s, 1.6).costs, work(Random(2))
    assert found is not None
    assert found.of(done) == pytest.approx(TRUE.of(done) * (1 if usual else 1.6), rel=0.05)


def test_a_step_that_stood_still_teaches_little() -> None:
    costs, random = learned(0, 1.0), Random(3)
    for second in range(600, 900):
        costs.learn(AT + second, work(random, 50.0 if second % 10 == 0 else 1.0))
    found, done = costs.costs, work(Random(2))
    assert found is not None
    assert found.of(done) == pytest.approx(TRUE.of(done), rel=0.15)


def test_steps_that_are_all_slow_do_not_stand_out_among_each_other() -> None:
    stalls = Stalls()
    usual = Slice(0.0, 0.0, 1, 0, 500, 1, 0, 0, 0.1, 0, 0.16)
    for number in range(120):
        took_s = 0.16 if number < 20 else 0.64
        stalls.add(usual._replace(until=float(number), busy_s=took_s), TRUE, None)
    assert {stall.until for stall in stalls.between(0.0, 120.0)} == set(range(20, 28))


def test_nothing_is_known_of_few_steps() -> None:
    costs, random = StepCosts(), Random(1)
    for second in range(6):
        costs.learn(AT + second, work(random))
    assert costs.costs is None


@pytest.mark.parametrize(("tokens", "budget", "large"), [(200, 2048, 0), (3000, None, 2744)])
def test_prompts_cost_little_while_a_step_reads_the_weights(
    tokens: int, budget: float | None, large: int
) -> None:
    assert beyond_free(tokens, budget) == large
    # Each of two steps has as many tokens that cost little.
    assert beyond_free(3000, 2048) == 3000 - 2 * 256
