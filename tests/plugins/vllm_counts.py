"""What vLLM 0.32 gives to its stat loggers, by the names of its classes."""

from types import SimpleNamespace
from typing import Any

from goodput_agent_vllm.datagrams import HEADER, write_header


def header(run: int, records: int, first: int, dropped: int) -> bytes:
    """The header of a datagram, as the plugin writes it."""
    datagram = bytearray(HEADER.size)
    write_header(datagram, run, records, first, dropped)
    return bytes(datagram)


NOW = 1_790_000_000.0


def scheduler(**counts: Any) -> Any:
    values = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 3,
        "num_skipped_waiting_reqs": 4,
        "num_kv_fetch_reqs_by_stage": {"waiting_to_start": 1, "in_progress": 2},
        "kv_cache_usage": 0.25,
        "iteration_details": None,
    }
    return SimpleNamespace(**{**values, **counts})


def finished(**values: Any) -> Any:
    usual = {
        "finish_reason": "stop",
        "request_id": "chatcmpl-1",
        "e2e_latency": 2.0,
        "num_prompt_tokens": 100,
        "num_preemptions": 1,
        "num_generation_tokens": 11,
        "queued_time": 0.25,
        "prefill_time": 0.5,
        "decode_time": 1.0,
        "num_cached_tokens": 32,
    }
    return SimpleNamespace(**{**usual, **values})


def iteration(*ended: Any, at: float = NOW, **values: Any) -> Any:
    usual = {
        "iteration_timestamp": at,
        "num_generation_tokens": 7,
        "prompt_token_stats": SimpleNamespace(computed=68),
        "num_preempted_reqs": 1,
        "time_to_first_tokens_iter": [0.8],
        "finished_requests": list(ended),
    }
    return SimpleNamespace(**{**usual, **values})


def aborted_state(**stats: Any) -> Any:
    values = {
        "num_generation_tokens": 4,
        "num_preemptions": 2,
        "arrival_time": NOW - 3,
        "queued_ts": 10.0,
        "scheduled_ts": 10.5,
        "first_token_ts": 11.5,
        "last_token_ts": 12.5,
        "first_token_latency": 1.75,
    }
    return SimpleNamespace(
        stats=SimpleNamespace(**{**values, **stats}),
        external_req_id="cmpl-left-0",
        prompt_len=602,
        num_cached_tokens=16,
    )
