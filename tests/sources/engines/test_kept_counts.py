"""Counters of an engine whose ranks and replicas leave and come back."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.engine_counts import counts_between
from agent.analysis.failures.progress import restart_between
from agent.catalog import engine_facts as fact
from agent.records.engine import EngineSample
from agent.sources.engines.engine_source import EngineSource
from agent.store.minutes import MinuteStore
from agent.store.observations import ObservationStore
from tests.store.migrated import migrated_in

OUTPUT, FINISHED, TTFT = fact.OUTPUT_TOKENS, fact.REQUESTS_FINISHED, fact.TIME_TO_FIRST_TOKEN
RANKS, REPLICAS = 'vllm:{name}{{engine="{part}",{rest}}}', (
    'ray_vllm_{name}{{ReplicaId="{part}",WorkerId="w{part}",engine="0",{rest}}}'
)  # fmt: skip


def page(spelled: str, counts: Mapping[str, float], started: float | None = None) -> bytes:
    """An exposition in which each part has counted so many tokens and requests."""

    def line(part: str, name: str, value: float, rest: str = 'model_name="m"') -> str:
        return f"{spelled.format(name=name, part=part, rest=rest)} {value}\n"

    lines = [
        text
        for part, count in counts.items()
        for text in (
            line(part, "num_requests_running", 1.0),
            line(part, "generation_tokens_total", count),
            line(part, "request_success_total", count, 'finished_reason="stop"'),
            line(part, "time_to_first_token_seconds_bucket", count, 'le="0.1"'),
            line(part, "time_to_first_token_seconds_bucket", count, 'le="+Inf"'),
            line(part, "time_to_first_token_seconds_sum", count / 16),
        )
    ]
    if started is not None:
        lines.append(f"process_start_time_seconds {started}\n")
    return "".join(lines).encode()


def read_all(pages: Sequence[bytes], before: EngineSample | None = None) -> list[EngineSample]:
    answers = iter(pages)
    source = EngineSource(
        name="chat", url="http://chat", before=before, read_path=lambda _: next(answers)
    )
    found = [source.read(1000.0 + 5 * n).sample for n in range(len(pages))]
    samples = [sample for sample in found if sample is not None]
    assert len(samples) == len(pages)
    return samples


def counted(sample: EngineSample) -> float:
    """What the engine counted, which is the same in all its counters and in its histogram."""
    tokens = sample.fact(OUTPUT.name)
    histogram = sample.histograms[TTFT.name]
    assert tokens is not None
    assert sample.fact(FINISHED.name, "stop") == tokens
    assert histogram.counts == (tokens, tokens)
    assert histogram.sum == tokens / 16
    return tokens


@pytest.mark.parametrize(
    ("spelled", "counts", "expected"),
    [
        (RANKS, [{"0": 1100, "1": 2200}, {"0": 1200}], 3400),
        (REPLICAS, [{"a": 1000, "b": 3000}, {"a": 1100}], 4100),
        (RANKS, [{"0": 5, "1": 9}, {"0": 6}, {"0": 6, "1": 10}], 16),
        (RANKS, [{"0": 5, "1": 9}, {"0": 6}, {"0": 6, "1": 2}], 17),
        (RANKS, [{"0": 5, "1": 9}, {"0": 6, "1": 2}], 17),
        (REPLICAS, [{"a": 5}, {"b": 7}], 12),
    ],
    ids=[
        "a rank leaves", "a replica leaves", "a rank is missing once", "a rank comes back anew",
        "a rank began again beside another", "a replica replaces another",
    ],
)  # fmt: skip
def test_what_a_part_had_counted_is_kept(
    spelled: str, counts: Sequence[Mapping[str, float]], expected: float
) -> None:
    samples = read_all([page(spelled, each) for each in counts])
    assert counted(samples[-1]) == expected
    assert restart_between(samples[-2], samples[-1]) is None


def fallen(fell: int, *, zeros: int = 0) -> EngineSample:
    """Beside a rank that goes on, as many of another one's counters fell; some were always zero."""

    def counts(of_rank_0: Sequence[float]) -> bytes:
        ranks = {"1": [9.0] * len(names), "0": of_rank_0}
        return "".join(
            f'vllm:{name}{{engine="{rank}",model_name="m"{rest}}} {value}\n'
            for rank, values in ranks.items()
            for (name, rest), value in zip(names, values, strict=True)
        ).encode()

    names = [("generation_tokens_total", "")] + [
        ("request_success_total", f',finished_reason="r{number}"') for number in range(5)
    ]
    positive = len(names) - zeros
    before = [10.0] * positive + [0.0] * zeros
    after = [2.0] * fell + [11.0] * (positive - fell) + [0.0] * zeros
    return read_all([counts(before), counts(after)])[-1]


@pytest.mark.parametrize(
    ("fell", "zeros", "expected"),
    [(1, 0, 9 + 2), (3, 0, 9 + 2), (4, 0, 9 + 10 + 2), (3, 1, 9 + 10 + 2)],
)
def test_a_rank_began_again_if_most_of_what_it_had_counted_fell(
    fell: int, zeros: int, expected: float
) -> None:
    assert fallen(fell, zeros=zeros).fact(OUTPUT.name) == expected


@pytest.mark.parametrize(("started", "after"), [(None, {"0": 3}), (9.0, {"0": 1300})])
def test_an_engine_that_restarts_begins_at_its_own_counts(
    started: float | None, after: Mapping[str, float]
) -> None:
    before = None if started is None else 1.0
    pages = [page(RANKS, {"0": 1100, "1": 2200}, before), page(RANKS, {"0": 1200}, before)]
    *_, last, restarted = read_all([*pages, page(RANKS, after, started)])
    assert counted(last) == 3400
    assert counted(restarted) == sum(after.values())
    assert restart_between(last, restarted) is not None


@pytest.mark.parametrize(("now", "expected"), [(1250, 3450), (3, 3)])
def test_an_agent_that_starts_again_knows_what_was_kept_unless_the_engine_has_restarted(
    tmp_path: Path, now: float, expected: float
) -> None:
    *_, last = read_all([page(REPLICAS, each) for each in ({"a": 1100, "b": 2200}, {"a": 1200})])
    with migrated_in(tmp_path) as database:
        ObservationStore(database, "agent-0").write_engine_sample(last)
        before = MinuteStore(database, "agent-0").newest_sample("chat", 2000.0)
    assert before is not None
    assert before.facts.items() >= last.facts.items()
    first, second = read_all([page(REPLICAS, {"a": now}), page(REPLICAS, {"a": now + 5})], before)
    assert [each.fact(OUTPUT.name) for each in (first, second)] == [expected, expected + 5]
    assert (restart_between(before, first) is None) is (now == 1250)
    assert restart_between(first, second) is None


# Of each scrape, what each part does: it works on, leaves, or a new one takes its place.
DOES = st.dictionaries(
    st.sampled_from("0123"), st.sampled_from(["work", "leave", "anew"]), max_size=4
)


@given(st.sampled_from([RANKS, REPLICAS]), st.lists(st.tuples(DOES, st.integers(1, 9)), max_size=9))
def test_a_counter_is_what_all_parts_ever_counted_in_any_order_of_leaving_and_coming(
    spelled: str, scrapes: Sequence[tuple[Mapping[str, str], int]]
) -> None:
    # One part goes on, else the engine would have restarted.
    counts, gone, expected = {"on": 1.0, "0": 20.0}, dict[str, float](), [21.0]
    pages = [page(spelled, counts)]
    for does, more in scrapes:
        total, counts = expected[-1] + more, {**counts, "on": counts["on"] + more}
        for part, what in does.items():
            if part in counts and what == "work":
                counts[part], total = counts[part] + more, total + more
            elif part in counts:
                gone[part] = counts.pop(part)
                if what == "anew" and gone[part] > 1:
                    # It has counted less since: more would be the old one's.
                    counts[part], total = 1.0, total + 1.0
            elif what == "work" and part in gone:
                counts[part], total = gone[part] + more, total + more
            elif part not in gone:
                counts[part], total = float(more), total + more
        pages.append(page(spelled, counts))
        expected.append(total)
    assert [counted(sample) for sample in read_all(pages)] == expected


def test_replicas_have_all_their_blocks_and_ranks_of_one_replica_the_same() -> None:
    def config(replica: str, rank: int) -> str:
        part = f'model_name="m",ReplicaId="{replica}",engine="{rank}"'
        labels = f'{part},num_gpu_blocks="1000",block_size="16"'
        return f"ray_vllm_cache_config_info{{{labels}}} 1\n"

    lines = [config(replica, rank) for replica in "ab" for rank in (0, 1)]
    (sample,) = read_all(["".join(lines).encode()])
    assert sample.fact(fact.KV_BLOCKS.name) == 2000
    assert sample.fact(fact.KV_BLOCK_TOKENS.name) == 16


def of_http(codes: Mapping[str, float]) -> bytes:
    """An exposition of vLLM's counters, of which the labelled one has only what it counted."""
    head = (
        b"# TYPE vllm:request_success_total counter\n"
        b"# TYPE vllm:e2e_request_latency_seconds histogram\n"
    )
    counts = [f'http_requests_total{{status="{code}"}} {n}\n' for code, n in codes.items()]
    others = page(RANKS, {"0": 7}).replace(b"request_success", b"other")
    return head + others + "".join(counts).encode()


def test_a_labelled_counter_that_first_appears_has_grown_from_zero_if_its_family_was_there() -> (
    None
):
    new = b'vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 3\n'
    unknown = b'vllm:admission_rejections_total{reason="queue"} 5\n'
    first, second = read_all([of_http({"2xx": 9}), of_http({"2xx": 9, "5xx": 4}) + new + unknown])
    counts = counts_between(first, second)
    assert counts is not None
    assert counts.counters[FINISHED.name, ("stop",)] == 3
    assert counts.counters[fact.REQUESTS_FAILED.name, ("5xx",)] == 4
    assert (fact.ADMISSION_REJECTIONS.name, ("queue",)) not in counts.counters


def test_a_histogram_that_first_appears_has_grown_from_zero_if_its_family_was_there() -> None:
    name = "vllm:e2e_request_latency_seconds"
    new = f'{name}_bucket{{le="+Inf"}} 3\n{name}_sum 9\n'.encode()
    first, second = read_all([of_http({}), of_http({}) + new])
    counts = counts_between(first, second)
    assert counts is not None
    assert counts.histograms[fact.REQUEST_DURATION.name].counts == (3.0,)
