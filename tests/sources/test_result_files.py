"""Result files of load generators, against the figures that these computed of the same requests."""

import gzip
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agent.analysis.comparison.comparing import compare_figures
from agent.analysis.comparison.run_columns import RunColumns, RunFigures, run_of
from agent.catalog.definitions import GOODPUT
from agent.records.objective import Objective
from agent.records.request import Status
from agent.sources.result_files import (
    BenchedFigures,
    BenchedRun,
    ResultFileInvalid,
    read_result_file,
)
from agent.sources.result_files.benched import check_numbers

FOLDER = Path(__file__).parents[1] / "data" / "comparison"
# What strangers sent.
FOREIGN = Path(__file__).parents[1] / "data" / "foreign"
VLLM = FOLDER / "same-00-before.json.gz"
AIPERF = FOLDER / "aiperf-0.13.0" / "profile_export.jsonl.gz"
AIPERF_FIGURES = FOLDER / "aiperf-0.13.0" / "profile_export_aiperf.json.gz"
GUIDELLM = FOLDER / "guidellm-0.8.1.json.gz"
# What vLLM 0.32 leaves out without --save-detailed (vllm/benchmarks/serve.py).
DETAILS = ["input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"]


def content(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return found


def written(folder: Path, content: object) -> Path:
    file = folder / "file.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return file


def requests_of(path: Path) -> BenchedRun:
    found = read_result_file(path)
    assert isinstance(found, BenchedRun)
    return found


def columns_of(
    path: Path, *, ttft_s: float | None = None, tpot_s: float | None = None
) -> RunColumns:
    objective = Objective(
        name="o", definition=GOODPUT, target=1.0, window_s=1.0, ttft_s=ttft_s, tpot_s=tpot_s
    )
    return run_of("run", requests_of(path).records, objective, {})


def test_the_requests_of_vllm_give_its_own_figures() -> None:
    file, run = content(VLLM), columns_of(VLLM, ttft_s=1.0, tpot_s=0.1)
    assert run.requests == file["completed"] == file["num_prompts"]
    assert run.length_s == pytest.approx(file["duration"], rel=0.02)
    assert np.median(run.ttft_s) * 1000 == pytest.approx(file["median_ttft_ms"], rel=0.01)
    assert np.mean(run.tpot_s) * 1000 == pytest.approx(file["mean_tpot_ms"], rel=0.01)
    assert np.percentile(run.ttft_s, 99) * 1000 == pytest.approx(file["p99_ttft_ms"], rel=0.01)
    assert run.input_tokens.sum() == file["total_input_tokens"]
    assert run.output_tokens.sum() == file["total_output_tokens"]
    # The file was made with these limits.
    good = file["request_goodput"] * file["duration"]
    assert run.met.sum() == pytest.approx(good, abs=0.1)
    assert requests_of(VLLM).load == {"request rate": "no limit", "concurrency": "8"}


def test_vllms_file_without_details_has_only_figures(tmp_path: Path) -> None:
    kept = {name: each for name, each in content(VLLM).items() if name not in DETAILS}
    found = read_result_file(written(tmp_path, kept))
    assert isinstance(found, BenchedFigures)
    assert found.figures["TTFT p50"] * 1000 == pytest.approx(kept["median_ttft_ms"])
    assert found.figures["TPOT p99"] * 1000 == pytest.approx(kept["p99_tpot_ms"])
    assert found.figures["goodput"] == kept["request_goodput"]
    assert "end to end p50" not in found.figures


def test_the_requests_of_aiperf_give_its_own_figures() -> None:
    figures, run = content(AIPERF_FIGURES), columns_of(AIPERF, ttft_s=0.3, tpot_s=0.05)
    for metric, column in (
        ("time_to_first_token", run.ttft_s),
        ("inter_token_latency", run.tpot_s),
        ("request_latency", run.e2e_s),
    ):
        for percent in (50, 95, 99):
            expected_ms = figures[metric][f"p{percent}"]
            assert np.percentile(column, percent) * 1000 == pytest.approx(expected_ms, rel=0.01)
    assert run.requests == figures["request_count"]["avg"]
    assert run.length_s == pytest.approx(figures["benchmark_duration"]["avg"], rel=0.1)
    assert run.output_tokens.sum() == figures["total_osl"]["avg"]
    # It was run with these limits, and is stricter only with a single token.
    assert run.met.sum() == figures["good_request_count"]["avg"]


def test_aiperfs_figures_are_those_of_its_requests() -> None:
    found = read_result_file(AIPERF_FIGURES)
    assert isinstance(found, BenchedFigures)
    run = columns_of(AIPERF)
    assert found.figures["TTFT p50"] == pytest.approx(float(np.median(run.ttft_s)))
    assert found.figures["output tokens, mean"] == run.output_tokens.mean()
    assert found.load == requests_of(AIPERF).load
    assert found.load["concurrency"] == "4"


def test_the_requests_of_guidellm_give_its_own_figures() -> None:
    run = columns_of(GUIDELLM)
    metrics = content(GUIDELLM)["benchmarks"][0]["metrics"]
    for metric, values in (
        ("time_to_first_token_ms", run.ttft_s * 1000),
        ("inter_token_latency_ms", run.tpot_s * 1000),
        ("request_latency", run.e2e_s),
    ):
        # It takes one of the two in the middle.
        either = [np.quantile(values, 0.5, method=each) for each in ("inverted_cdf", "higher")]
        median = metrics[metric]["successful"]["median"]
        assert any(median == pytest.approx(each, rel=0.01) for each in either), metric
    assert run.output_tokens.sum() == metrics["output_token_count"]["successful"]["total_sum"]
    assert requests_of(GUIDELLM).load["concurrency"] == "4"


def test_a_response_of_guidellm_has_a_tpot_from_two_tokens_on(tmp_path: Path) -> None:
    whole = content(GUIDELLM)
    requests = whole["benchmarks"][0]["requests"]["successful"]
    for number, tokens in enumerate((1, 2)):
        requests[number] |= {"output_tokens": tokens, "inter_token_latency_ms": 30.0}
    found = requests_of(written(tmp_path, whole))
    assert [each.tpot_s for each in found.records[:2]] == [None, 0.03]


def test_a_sample_of_guidellms_requests_is_not_taken_for_all(tmp_path: Path) -> None:
    whole = content(GUIDELLM)
    requests = whole["benchmarks"][0]["requests"]
    requests["successful"] = requests["successful"][:5]
    found = read_result_file(written(tmp_path, whole))
    assert isinstance(found, BenchedFigures)
    run = columns_of(GUIDELLM)
    assert found.requests == 20
    as_run = RunFigures(
        name="figures", requests=found.requests, length_s=found.length_s, figures=found.figures
    )
    lines = compare_figures(run, as_run).lines
    changes = {line.measure.name: line.change for line in lines if line.change is not None}
    # Its percentiles are of the same definition, and its rates leave out the ends of the run.
    assert changes["TTFT p50"] == pytest.approx(0, abs=0.05)
    assert changes["end to end p95"] == pytest.approx(0, abs=0.05)
    assert changes["output tokens/s"] == pytest.approx(0, abs=0.05)
    assert changes["error ratio"] == 0


def test_one_of_several_benchmarks_is_named(tmp_path: Path) -> None:
    whole = content(GUIDELLM)
    whole["benchmarks"] *= 2
    file = written(tmp_path, whole)
    with pytest.raises(ResultFileInvalid, match=r"has 2 benchmarks; name one: .*#0 to #1"):
        read_result_file(file)
    assert read_result_file(file, 1) == read_result_file(file, 0)
    with pytest.raises(ResultFileInvalid, match="no benchmark 2; its last one is 1"):
        read_result_file(file, 2)


def test_how_requests_ended(tmp_path: Path) -> None:
    whole = content(GUIDELLM)
    requests = whole["benchmarks"][0]["requests"]
    requests["errored"], requests["incomplete"] = ([requests["successful"].pop()] for _ in range(2))
    records = requests_of(written(tmp_path, whole)).records
    statuses = [record.status for record in records]
    assert statuses == [Status.OK] * 18 + [Status.ERROR, Status.CANCELLED]
    # What a request took that did not end well says nothing of the others.
    assert records[18].e2e_s is None


def test_a_failed_request_of_vllm(tmp_path: Path) -> None:
    whole = content(VLLM)
    whole["errors"][3] = "Traceback: connection refused"
    run = columns_of(written(tmp_path, whole), ttft_s=9e9)
    assert (run.failed.sum(), run.met[3]) == (1, 0)
    assert np.isnan(run.ttft_s[3])


BROKEN: Mapping[str, bytes] = {
    "empty": b"",
    "no JSON": b"PK\x03\x04",
    "cut off": GUIDELLM.read_bytes()[:900],
    "another tool's": b'{"results": []}',
    "a list": b"[1, 2]",
    "other types": b'{"duration": "x", "completed": 1, "output_throughput": 1}',
    "a torn archive": gzip.compress(b"{}" * 99)[:20],
    "deep": b"[" * 100_000,
    "deep inside": b'{"duration": 1, "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "damaged deflate": GUIDELLM.read_bytes()[:200] + b"\xff" * 99,
    "a wrong checksum": gzip.compress(b"{}")[:-8] + bytes(8),
    "warm-up alone": b'{"metadata": {"request_start_ns": 1, "request_end_ns": 2, '
    b'"benchmark_phase": "warmup"}, "metrics": {}}',
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_no_result_file_is_refused_in_a_sentence(tmp_path: Path, kind: str) -> None:
    with pytest.raises(ResultFileInvalid, match=r"file\.json"):
        read_result_file(written(tmp_path, BROKEN[kind]))


HUGE = {"400 digits": "9" * 400, "inf": "1e999", "-inf": "-1e999", "1e308": "1e308"}


def _with_number(file: Path, path: str, number: str) -> bytes:
    """The content of a recorded file with another number at a path of keys."""
    whole = content(file)
    inner: Any = whole
    *keys, last = (int(key) if key.isdigit() else key for key in path.split("."))
    for key in keys:
        inner = inner[key]
    assert last in range(len(inner)) if isinstance(last, int) else last in inner
    inner[last] = "THE NUMBER"
    return json.dumps(whole).replace('"THE NUMBER"', number).encode()


@pytest.mark.parametrize("number", HUGE)
@pytest.mark.parametrize(
    ("file", "path"),
    [
        (VLLM, "duration"),
        (VLLM, "ttfts.0"),
        (VLLM, "start_times.1"),
        (VLLM, "output_lens.0"),
        (VLLM, "max_concurrency"),
        (AIPERF_FIGURES, "time_to_first_token.p50"),
        (AIPERF_FIGURES, "request_count.avg"),
        (AIPERF_FIGURES, "benchmark_duration.avg"),
        (GUIDELLM, "benchmarks.0.requests.successful.0.time_to_first_token_ms"),
        (GUIDELLM, "benchmarks.0.requests.successful.0.request_end_time"),
        (GUIDELLM, "benchmarks.0.metrics.request_totals.total"),
    ],
)
def test_a_number_that_no_figure_can_hold_is_refused_or_not_used(
    tmp_path: Path, file: Path, path: str, number: str
) -> None:
    changed = written(tmp_path, _with_number(file, path, HUGE[number]))
    said = ""
    try:
        check_numbers(read_result_file(changed))
    except ResultFileInvalid as error:
        said = str(error)
    assert said == "" or said.startswith(f"{changed} cannot be read: ")
    assert len(said) < 400


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        # Without a time, of which the name of this test is made.
        (
            gzip.compress(b"{}" + b" " * 10_000, mtime=0),
            "more than 10,000 bytes after decompression",
        ),
        (b"{}" + b" " * 10_000, "it has more than 10,000 bytes"),
        *(
            (values, "it has more than 1,000 values")
            for values in (b"[0" + b",0" * 1000 + b"]", b"{}" + b"\n" * 1000, b"[" * 1001)
        ),
    ],
)
def test_a_file_beyond_the_limits_is_refused_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    monkeypatch.setattr("agent.sources.result_files.MAX_BYTES", 10_000)
    monkeypatch.setattr("agent.sources.result_files._MAX_VALUES", 1000)
    with pytest.raises(ResultFileInvalid, match=reason):
        read_result_file(written(tmp_path, content))


def test_a_folder_without_aiperfs_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ResultFileInvalid, match=r"has no profile_export\.jsonl"):
        read_result_file(tmp_path)


# Files of strangers, read by hand


def figures_of(path: Path, number: int | None = None) -> BenchedFigures:
    found = read_result_file(path, number)
    assert isinstance(found, BenchedFigures)
    return found


def test_a_file_with_several_runs_asks_which() -> None:
    """As `--append-result` writes it: a line for each run."""
    appended = FOREIGN / "13-vllm-bench-append-result.json"
    with pytest.raises(ResultFileInvalid, match=r"has 3 benchmarks; name one: .*#0 to #2"):
        read_result_file(appended)
    p50 = [figures_of(appended, number).figures["TTFT p50"] for number in range(3)]
    assert p50 == pytest.approx([0.0530, 0.0745, 0.8771], abs=1e-4)


def test_a_file_without_failures_counts_them_by_the_prompts_or_not_at_all() -> None:
    half = figures_of(FOREIGN / "19-vllm-bench-half-failed.json")
    assert (half.requests, half.figures["error ratio"]) == (300, 0.5)
    whole = figures_of(FOREIGN / "12-vllm-bench-10qps.json")
    assert whole.figures["error ratio"] == 0
    sglang = figures_of(FOREIGN / "14-sglang-bench-serving.jsonl", 0)
    assert "error ratio" not in sglang.figures
    assert "requests/s" not in sglang.figures


def test_a_file_of_sglang_is_its_own() -> None:
    runs = [figures_of(FOREIGN / "14-sglang-bench-serving.jsonl", number) for number in (0, 1)]
    assert [run.load["request rate"] for run in runs] == ["2", "4"]
    assert {run.tool for run in runs} == {"SGLang bench_serving"}
    assert runs[0].figures["end to end p50"] == pytest.approx(0.60686)
    assert runs[0].figures["output tokens, mean"] == pytest.approx(218_257 / 996)
    # It wrote -0.0.
    assert "TPOT p50" not in runs[0].figures


def test_a_file_of_inferencex_has_seconds() -> None:
    found = figures_of(FOREIGN / "15-inferencex-conc16.json")
    assert found.tool == "InferenceX"
    assert found.figures["TTFT p50"] == pytest.approx(0.2914, abs=1e-4)
    assert found.figures["TPOT p50"] == pytest.approx(0.0336, abs=1e-4)
    assert found.figures["input tokens, mean"] == 1024


SUMMARIES = {
    "inference-perf": {
        "load_summary": {"count": 100},
        "successes": {
            "count": 95,
            "latency": {
                "request_latency": {"median": 2.0, "p95": 3.0, "p99": 4.0},
                "time_to_first_token": {"median": 0.2, "p95": 0.3, "p99": 0.4},
                "time_per_output_token": {"median": 0.02, "p95": 0.03, "p99": 0.04},
            },
            "throughput": {"output_tokens_per_sec": 500.0, "requests_per_sec": 5.0},
            "prompt_len": {"mean": 200.0},
            "output_len": {"mean": 100.0},
        },
        "failures": {"count": 5},
    },
    "LLMPerf": {
        "num_concurrent_requests": 8,
        "results_num_requests_started": 100,
        "results_error_rate": 0.05,
        "results_ttft_s_quantiles_p50": 0.2,
        "results_ttft_s_quantiles_p95": 0.3,
        "results_ttft_s_quantiles_p99": 0.4,
        "results_end_to_end_latency_s_quantiles_p50": 2.0,
        "results_end_to_end_latency_s_quantiles_p95": 3.0,
        "results_end_to_end_latency_s_quantiles_p99": 4.0,
        "results_inter_token_latency_s_quantiles_p50": 0.021,
        "results_mean_output_throughput_token_per_s": 500.0,
        "results_number_input_tokens_mean": 200.0,
        "results_number_output_tokens_mean": 100.0,
    },
    "GenAI-Perf": {
        "request_count": {"unit": "count", "avg": 100.0},
        "request_throughput": {"unit": "requests/sec", "avg": 5.0},
        "request_latency": {
            "unit": "ms",
            "avg": 2100.0,
            "p50": 2000.0,
            "p95": 3000.0,
            "p99": 4000.0,
        },
        "time_to_first_token": {"unit": "ms", "p50": 200.0, "p95": 300.0, "p99": 400.0},
        "inter_token_latency": {"unit": "ms", "p50": 20.0, "p95": 30.0, "p99": 40.0},
        "output_token_throughput": {"unit": "tokens/sec", "avg": 500.0},
        "input_sequence_length": {"avg": 200.0},
        "output_sequence_length": {"avg": 100.0},
    },
}


@pytest.mark.parametrize("tool", SUMMARIES)
def test_a_summary_gives_its_figures_in_our_units(tool: str, tmp_path: Path) -> None:
    found = figures_of(written(tmp_path, SUMMARIES[tool]))
    assert (found.tool, found.requests) == (tool, 100)
    expected = {
        **{f"TTFT p{p}": s for p, s in ((50, 0.2), (95, 0.3), (99, 0.4))},
        **{f"end to end p{p}": s for p, s in ((50, 2.0), (95, 3.0), (99, 4.0))},
        "input tokens, mean": 200.0,
        "output tokens, mean": 100.0,
        "output tokens/s": 500.0,
    }
    assert expected.items() <= found.figures.items()
    # LLMPerf's inter-token latency is over all tokens, and GenAI-Perf does not tell what failed.
    assert found.figures.get("TPOT p50") == (None if tool == "LLMPerf" else 0.02)
    assert found.figures.get("error ratio") == (None if tool == "GenAI-Perf" else 0.05)
