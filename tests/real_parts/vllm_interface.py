"""What the plugin uses of a vLLM, read from its sources: importing it takes ten seconds."""

import ast
from pathlib import Path
from typing import NamedTuple

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
