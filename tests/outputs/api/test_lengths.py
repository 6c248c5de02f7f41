"""Verdicts by input and output length, compared with exact counts."""

from collections import Counter

import pytest

from agent.analysis.input_lengths import INPUT_LENGTHS, OUTPUT_LENGTHS
from agent.records.request import RequestRecord
from tests.outputs.api.serving import Api
from tests.outputs.api.traffic import NOW, chosen, ended_within, verdicts_of
from tests.records.making import objective, record


@pytest.mark.parametrize("selection", [{}, {"model": "qwen"}, {"objective": "long"}], ids=str)
def test_each_request_of_the_window_is_counted_once(
    busy: Api, records: list[RequestRecord], selection: dict[str, str]
) -> None:
    response = busy.query("lengths", window="2h", **selection)
    recent = ended_within(chosen(records, **selection), NOW - response["window_s"], NOW)
    known = [item for item in recent if item.input_tokens is not None]
    verdicts = Counter(verdicts_of(item)[selection.get("objective", "")] for item in known)
    for verdict in ("met", "missed"):
        assert sum(item[verdict] for item in response["items"]) == verdicts[verdict]


def test_a_group_includes_its_lower_edge(api_of_each: Api) -> None:
    tokens = {(1023, 63): ("0-1k", "0-64"), (1024, 64): ("1k-4k", "64-256")}
    tokens |= {(65535, 4095): ("16k-64k", "1k-4k"), (65536, 4096): ("64k+", "4k+")}
    ended_at = api_of_each.agent.now - 1
    rows = [
        record(number, input_tokens=of_input, output_tokens=of_output, ended_at=ended_at)
        for number, (of_input, of_output) in enumerate(tokens)
    ]
    late = record(9, input_tokens=1024, output_tokens=64, ttft_s=9.0, ended_at=ended_at)
    api_of_each.store([*rows, late], [objective()])
    response = api_of_each.query("lengths", window="10m")
    found = {
        (item["input_length"], item["output_length"]): (item["met"], item["missed"])
        for item in response["items"]
    }
    assert found == {group: (1, 0) for group in tokens.values()} | {("1k-4k", "64-256"): (1, 1)}
    assert response["input_lengths"] == list(INPUT_LENGTHS)
    assert response["output_lengths"] == list(OUTPUT_LENGTHS)
    halves = [item["attainment"] for item in response["items"] if item["missed"]]
    assert halves == [0.5]
