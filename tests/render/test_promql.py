"""The PromQL builder: expressions that it writes, and ones that it refuses."""

import re
from fnmatch import fnmatchcase

import pytest

from agent.catalog import engine_facts as fact
from agent.catalog import gpu_facts as gpu
from agent.catalog import metrics as m
from agent.outputs.prometheus.latency_histograms import bound_text
from agent.render.promql import buckets_of, count_of, eq, like, narrowed, quoted, upto, value_of


def test_a_series_has_its_ending_and_the_labels_that_the_exposition_adds() -> None:
    assert value_of(m.REQUESTS) == "llm_requests_total"
    assert value_of(m.ENGINE_UP) == "llm_engine_up"
    assert count_of(m.TTFT) == "gen_ai_server_time_to_first_token_seconds_count"
    assert value_of(fact.STEPS, eq("engine", "a")) == 'llm_engine_steps_total{engine="a"}'
    assert value_of(gpu.UP, eq("gpu", "b")) == 'gpu_up{gpu="b"}'
    assert buckets_of(m.QUEUE, upto(0.1)) == 'llm_request_queue_seconds_bucket{le="0.1"}'


def test_a_label_that_is_not_published_cannot_be_selected() -> None:
    with pytest.raises(ValueError, match="llm_requests has no label 'tenant'"):
        value_of(m.REQUESTS, eq("tenant", "a"))
    with pytest.raises(ValueError, match="no label 'model'"):
        value_of(gpu.UP, eq("model", "a"))
    with pytest.raises(ValueError, match="no label 'le'"):
        count_of(m.QUEUE, upto(0.1))


@pytest.mark.parametrize("bound", [0.00005, 0.0025, 0.2, 0.64, 12.5, 327.68])
def test_an_edge_is_written_as_in_the_exposition(bound: float) -> None:
    assert upto(bound).text == f'le="{bound_text(bound)}"'
    # A whole one is found in either spelling.
    assert upto(10.0).text == 'le=~"10([.]0)?"'


def test_quotes_and_backslashes_do_not_end_a_string() -> None:
    assert quoted('a"b\\c') == '"a\\"b\\\\c"'


def test_a_pattern_matches_what_the_glob_matches() -> None:
    assert like("model", "*") == ()
    names = ["llama", "llama-3.1", "llama-3x1", "x", "d", "[x]", "qwen", "a[b", "(x|y)+", "dx"]
    for glob in ("llama*", "llama-3.1", "[!a-c]", "?", "[[]x]", "*w*", "a[b", "(x|y)+", "[!a-c]x"):
        (matcher,) = like("model", glob)
        inside = matcher.text.removeprefix('model=~"').removesuffix('"').replace("\\\\", "\\")
        fitting = [name for name in names if re.fullmatch(inside, name)]
        assert fitting == [name for name in names if fnmatchcase(name, glob)], glob


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("up == 0", 'up{c="x"} == 0'),
        (
            'sum by (a, b) (rate(n_total{le="1"}[5m] offset 30m)) > 1e9 * n:m',
            'sum by (a, b) (rate(n_total{c="x",le="1"}[5m] offset 30m)) > 1e9 * n:m{c="x"}',
        ),
        (
            'a{b="sum {} (up)"}\nunless on (b) c or vector(1)',
            'a{c="x",b="sum {} (up)"}\nunless on (b) c{c="x"} or vector(1)',
        ),
        (
            "max(a) by (b) / on (b) group_left (d) e",
            'max(a{c="x"}) by (b) / on (b) group_left (d) e{c="x"}',
        ),
        ("a{b=%q} > ${limit}", 'a{c="x",b=%q} > ${limit}'),
    ],
)
def test_a_matcher_is_put_into_each_selector(expression: str, expected: str) -> None:
    assert narrowed(expression, 'c="x",') == expected
