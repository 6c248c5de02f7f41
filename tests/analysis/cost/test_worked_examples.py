"""Two known errors in cost figures of self-hosted models, and the correct figures."""

import pytest

from agent.analysis.cost.minute_cost import MinuteCost
from agent.analysis.cost.weights import OUTPUT_TOKEN_WEIGHT, Method
from agent.analysis.efficiency.serving import Serving
from agent.records.request import Status
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    MINUTE,
    UNKNOWN,
    busy_samples,
    cost,
    engine_sample,
    prefill,
    request,
    shares,
    whole,
)

# A hundred requests, each with 0.1 s of prefill, then 200 tokens, one every 20 ms.
PREFILL_S, TPOT_S, OUTPUT = 0.1, 0.02, 200
HUNDRED = [
    request(
        number,
        number * 0.5,
        prefill_s=PREFILL_S,
        decode_s=(OUTPUT - 1) * TPOT_S,
        tpot_s=TPOT_S,
        input_tokens=500,
        output_tokens=OUTPUT,
    )
    for number in range(100)
]
STEPS = 2700.0


BILL = MINUTE.length_s


def hundred(serving: Serving = UNKNOWN) -> tuple[MinuteCost, Method]:
    samples = busy_samples(output=20_000, input=50_000, cached=0, steps=STEPS)
    method = shares(samples, HUNDRED, serving=serving).method
    return cost(samples, HUNDRED, serving=serving), method


def test_prefill_does_not_take_five_sixths_of_the_bill_as_in_opencost() -> None:
    prefill_s = sum(row.prefill_s or 0 for row in HUNDRED)
    opencost = prefill_s / (prefill_s + sum(row.tpot_s or 0 for row in HUNDRED))
    assert opencost == pytest.approx(0.83, abs=0.01)
    wall = prefill_s / (prefill_s + sum(row.decode_s or 0 for row in HUNDRED))
    assert wall == pytest.approx(0.024, abs=0.001)

    found, method = hundred(LLAMA_ON_H100)

    assert method is Method.ROOFLINE
    # By hand: 50,000 prompt tokens of 13.96 GFLOP and 0.5 TFLOP of scores and output matrix at
    # 989.4 TFLOP/s; 2,700 steps over 15.01 GB and 1.6 TB of cache at 3,350 GB/s.
    prefill_least_s = (50_000 * 13.96e9 + 100 * (0.0657e12 + 1.05e9)) / 989.4e12
    context_tokens = 199 * 500 + 199 * 200 / 2
    decode_least_s = (STEPS * 15.01e9 + 100 * (context_tokens + 199) * 131_072) / 3.35e12
    share = prefill_least_s / (prefill_least_s + decode_least_s)
    assert prefill(found) / BILL == pytest.approx(share, rel=0.01)
    assert share == pytest.approx(0.055, abs=0.005)


def test_without_a_model_the_weights_are_tokens() -> None:
    found, method = hundred()
    assert method is Method.TOKENS
    prompt, output = 50_000, 19_900 * OUTPUT_TOKEN_WEIGHT
    assert prefill(found) / BILL == pytest.approx(prompt / (prompt + output))


def test_concurrent_requests_share_one_bill() -> None:
    together = [
        request(number, 0.0, prefill_s=0.0, decode_s=60.0, output_tokens=1501)
        for number in range(64)
    ]
    by_response_time = sum(row.decode_s or 0 for row in together) / 60
    assert by_response_time == 64

    found = cost(busy_samples(output=64 * 1501, steps=1500), together, serving=LLAMA_ON_H100)

    assert whole(found) == pytest.approx(BILL)
    assert list(found.requests.values()) == pytest.approx([BILL / 64] * 64, rel=1e-3)


def test_cached_tokens_cost_only_their_attention() -> None:
    rows = [request(1, 5.0, input_tokens=8000, cached_tokens=7000, output_tokens=1)]
    found = cost(busy_samples(output=1, input=8000, cached=7000), rows, serving=LLAMA_ON_H100)
    assert 0 < found.cached / 7000 < found.computed / 1000 / 20


def test_the_invoice_of_the_cost_page() -> None:
    """docs/cost.md: a GPU at $3.60 an hour, a tenth of a cent a second."""
    lasted = ((0.0, 30.0), (10.0, 30.0), (30.0, 45.0))
    tokens = ((1000, 0, 251), (1000, 600, 101), (400, 0, 51))
    rows = [
        request(
            number,
            begun,
            decode_s=ended - begun - 1.0,
            input_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
        )._replace(ended_at=ended)
        for number, ((begun, ended), (prompt, cached, output)) in enumerate(
            zip(lasted, tokens, strict=True)
        )
    ]
    rows[2] = rows[2]._replace(status=Status.CANCELLED)
    totals = {"output": 504.0, "input": 2400.0, "cached": 600.0}
    samples = [
        engine_sample(
            at, running=float(at < 45), **{k: min(at / 45, 1.0) * n for k, n in totals.items()}
        )
        for at in range(0, 61, 5)
    ]
    found = cost(samples, rows)
    assert shares(samples, rows).method is Method.TOKENS
    cents = [0.1 * dollars for dollars in (*found.requests.values(), found.unseen, found.idle)]
    assert cents == pytest.approx([2.368, 0.947, 0.710, 0.475, 1.5], abs=0.0006)
    assert found.aborted == list(found.requests.values())[2]
