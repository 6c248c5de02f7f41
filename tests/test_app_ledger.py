"""The ledger of the running agent, beside an engine of known steps whose clients leave."""

from pathlib import Path
from typing import Any

import pytest

from tests.analysis.cost.stepped_engine import Job, Machine, SteppedEngine
from tests.real_parts.metric_pages import total
from tests.test_app_cost import Watched

# A request of 100 tokens takes 5 s.
SLOW = Machine(flops_per_s=989.4e12, bytes_per_s=3.35e12, overhead_s=0.05)
COMPUTED_S = 241.0


def served() -> SteppedEngine:
    """Five streams are left at 602 prompt tokens (vllm#55634); another one spans two minutes."""
    left = [
        Job(number=n, at=10.0 * n, prompt=602, output=800, leaves_at=20, has_row=False)
        for n in range(1, 6)
    ]
    lost = Job(number=6, at=70.0, prompt=50, output=30, has_row=False)
    stream = Job(number=7, at=5.0, prompt=1000, output=1500)
    others = [Job(number=n, at=4.0 * n, prompt=200, output=50) for n in range(8, 28)]
    engine = SteppedEngine(SLOW, [*left, lost, stream, *others], every_s=5.0).run(COMPUTED_S)
    assert 75 < stream.ended_at < 115
    return engine


def test_what_vanishes_is_on_the_api_and_on_metrics_and_a_long_stream_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = served()
    watched = Watched(tmp_path, engine, model=False, every_s=5.0, until_s=COMPUTED_S)
    seen = watched.watch(monkeypatch)
    ledger = seen.summary["ledger"]
    assert ledger["counted"] == {
        "input_tokens": sum(job.prompt for job in engine.ended),
        "output_tokens": sum(job.generated for job in engine.ended),
        "requests": len(engine.ended),
    }
    vanished = {"input_tokens": 5 * 602 + 50, "output_tokens": 5 * 20 + 30, "requests": 6}
    assert ledger["unaccounted"] == pytest.approx(vanished, abs=1e-6)
    by_reason = {"aborted": 5, "finished": 1, "died": 0, "refused": 0}
    assert ledger["unaccounted_requests"] == pytest.approx(by_reason, abs=1e-6)
    assert ledger["open"] == pytest.approx(dict.fromkeys(ledger["open"], 0.0), abs=1e-6)
    assert 0 < ledger["unaccounted_usd"] == seen.summary["cost"]["unseen_usd"]
    assert_published(seen.exposition, ledger)


def assert_published(exposition: str, ledger: dict[str, Any]) -> None:
    """The counters are the figures of the API; they never go down, so that some come later."""
    expected = {**ledger["unaccounted"], "cost_usd": ledger["unaccounted_usd"]}
    published = {name: total(exposition, f"llm_unaccounted_{name}_total") for name in expected}
    assert published == pytest.approx(expected, rel=0.02)
    for reason, requests in ledger["unaccounted_requests"].items():
        counted = total(exposition, "llm_unaccounted_requests_total", reason=reason)
        assert counted == pytest.approx(requests, abs=1e-6)
    assert total(exposition, "llm_rows_without_tokens_total") == 0
