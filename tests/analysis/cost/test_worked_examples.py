"""Two known errors in cost figures of self-hosted models, and the correct figures."""

from dataclasses import replace

import pytest

from agent.analysis.cost.weights import Method
from agent.records.request import Status
from tests.analysis.cost.engine_days import (
    LLAMA_ON_H100,
    UNKNOWN,
    busy_samples,
    cost,
    request,
    samples_of,
    whole,
)
from tests.analysis.cost.stepped_engine import H100, Job, SteppedEngine


def test_prefill_does_not_take_five_sixths_of_the_bill_as_in_opencost() -> None:
    """A hundred requests, each with 500 prompt tokens, then 200 tokens, one every 8 ms."""
    slow = replace(H100, overhead_s=0.003)
    jobs = [Job(number=n + 1, at=0.5 * n, prompt=500, output=200) for n in range(100)]
    engine = SteppedEngine(slow, jobs).run(65.0)
    rows = [job.row() for job in engine.ended]

    prefill_s = sum(row.prefill_s or 0 for row in rows)
    tpot_s = sum((row.decode_s or 0) / 199 for row in rows)
    opencost = prefill_s / (prefill_s + tpot_s)
    assert opencost > 0.5
    of_prompts = sum(job.prefill_gpu_s for job in jobs)
    true = of_prompts / (of_prompts + sum(job.decode_gpu_s for job in jobs))
    assert true == pytest.approx(0.02, abs=0.001)

    for serving, method in ((LLAMA_ON_H100, Method.ROOFLINE), (UNKNOWN, Method.TOKENS)):
        found = cost(engine.samples, rows, serving=serving)
        share = found.cost.prefill / sum(found.requests.values())
        assert share == pytest.approx(true, rel=0.1)
        assert found.method is method


def test_concurrent_requests_share_one_bill() -> None:
    together = [
        request(number, 0.0, prefill_s=0.0, decode_s=60.0, output_tokens=1501)
        for number in range(64)
    ]
    by_response_time = sum(row.decode_s or 0 for row in together) / 60
    assert by_response_time == 64

    found = cost(busy_samples(output=64 * 1501, steps=1500), together, serving=LLAMA_ON_H100)

    assert whole(found) == pytest.approx(60.0)
    assert list(found.requests.values()) == pytest.approx([60.0 / 64] * 64, rel=1e-3)


def test_cached_tokens_cost_only_their_attention() -> None:
    rows = [request(1, 5.0, input_tokens=8000, cached_tokens=7000, output_tokens=1)]
    found = cost(busy_samples(output=1, input=8000, cached=7000), rows, serving=LLAMA_ON_H100)
    assert 0 < found.cost.cached / 7000 < found.cost.computed / 1000 / 20


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
    # In the last 5 s the engine counts twice the tokens of the third request.
    gone = request(9, 40.01, prefill_s=0.0, input_tokens=0, output_tokens=19)
    gone = gone._replace(ended_at=45.0)
    samples = samples_of(*rows, gone)
    found = cost(samples, rows)
    assert found.method is Method.TOKENS
    cents = [
        0.1 * dollars for dollars in (*found.requests.values(), found.cost.unseen, found.cost.idle)
    ]
    assert cents == pytest.approx([1.999, 1.001, 1.243, 0.257, 1.5], abs=0.0006)
    assert found.cost.aborted == list(found.requests.values())[2]
