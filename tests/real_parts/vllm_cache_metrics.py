"""Prints what vLLM's own classes log and publish of drafts and of offloaded KV values, as JSON.

Runs with the engine's Python. Its input has `drafts`, for each step the drafted and accepted tokens
of each draft; `loads` and `tier_reads`, seconds and bytes.
"""

# mypy: disable-error-code="import-not-found"

import json
import sys
from types import SimpleNamespace
from typing import Any

import prometheus_client
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    OffloadingConnectorStats,
    OffloadPromMetrics,
)
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

LABELS, VALUES = ["model_name", "engine"], {0: ["org/model-8b", "0"]}
TIERS = [{"type": "fs", "root_dir": "/nowhere"}]
EXTRA = {"spec_name": "TieringOffloadingSpec", "secondary_tiers": TIERS}
_KINDS = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)


def drafted(steps: list[list[tuple[int, int]]]) -> list[str]:
    """Publish these drafts; the lines of the log."""
    most = max(tokens for step in steps for tokens, _ in step)
    logging, lines = SpecDecodingLogging(), []
    published = SpecDecodingProm(SimpleNamespace(num_speculative_tokens=most), LABELS, VALUES)
    for step in steps:
        stats = SpecDecodingStats.new(most)
        for tokens, accepted in step:
            stats.observe_draft(tokens, accepted)
        logging.observe(stats)
        published.observe(stats)
    logging.log(lambda text, *values: lines.append(text % values))
    return lines


def loaded(loads: list[tuple[float, int]], tier_reads: list[tuple[float, int]]) -> None:
    """Publish loads into the GPU, and reads of a tier that found three of four chunks."""
    transfer = SimpleNamespace(kv_connector_extra_config=EXTRA)
    config = SimpleNamespace(kv_transfer_config=transfer)
    offload = OffloadPromMetrics(config, {kind: kind for kind in _KINDS}, LABELS, VALUES)
    found = OffloadingConnectorStats()
    for seconds, size in loads:
        found.increase_counter("vllm:kv_offload_load_time", seconds)
        found.increase_counter("vllm:kv_offload_load_bytes", size)
    tiering = "vllm:kv_offload_tiering"
    for seconds, size in tier_reads:
        amounts = {"read_time": seconds, "read_bytes": size, "chunk_queries": 4, "chunk_hits": 3}
        for name, amount in amounts.items():
            found.increase_counter(f"{tiering}_{name}", amount, ("fs",))
    offload.observe(found.data)


def main() -> None:
    """Read the question, and print the answer as the last line."""
    asked: dict[str, Any] = json.loads(sys.stdin.read())
    lines = drafted(asked["drafts"])
    loaded(asked["loads"], asked["tier_reads"])
    page = prometheus_client.generate_latest().decode().splitlines(keepends=True)
    own = "".join(line for line in page if "vllm:" in line)
    sys.stdout.write(json.dumps({"log": lines, "page": own}) + "\n")


if __name__ == "__main__":
    main()
