"""The thresholds of alerts that an operator may set; those of objectives are in the settings.

In an expression or a text a threshold is `${name}`, until its value is known: in a file of rules
when it is rendered, in the Helm chart when it is installed.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal

from agent.analysis.burn_rates import MIN_MISSED
from agent.catalog.definitions import (
    DEEP_QUEUE,
    FULL_CACHE,
    ROOM_POOL_QUEUE,
    SHORT_POOL_QUEUE,
    UNEVEN_RANKS,
)

_PLACE = re.compile(r"\$\{(\w+)\}")


@dataclass(frozen=True, slots=True)
class AlertThreshold:
    """A number in alerts; `reason` says why the default is what it is."""

    name: str
    default: Decimal
    unit: str
    reason: str

    def __str__(self) -> str:
        return f"${{{self.name}}}"

    @property
    def percent(self) -> str:
        """A template of Prometheus for the number as a percentage."""
        # As a text: releases of Prometheus differ in which numbers they take.
        return f'{{{{ "{self}" | humanizePercentage }}}}'


THRESHOLDS: dict[str, AlertThreshold] = {}


def _threshold(name: str, default: float | str, unit: str, reason: str) -> AlertThreshold:
    THRESHOLDS[name] = AlertThreshold(name, Decimal(str(default)), unit, reason)
    return THRESHOLDS[name]


RATIO = "ratio"
_TIMES = "times"

MIN_EVENTS = _threshold(
    "min_events", 5, "events", "Of few events a share says little: one request of three is 33 %."
)
BUDGET_MIN_MISSED = _threshold(
    "budget_min_missed",
    MIN_MISSED,
    "requests",
    "A few misses page nobody, even if they are a large share of a quiet hour. The page of the "
    "agent always uses the default.",
)
EXPLAINED_RATIO = _threshold(
    "explained_ratio", 0.9, RATIO, "The misses that are left are no outage by themselves."
)
UNDETERMINED_RATIO = _threshold(
    "undetermined_ratio", 0.5, RATIO, "Attainment is of the other requests alone."
)
ERROR_PAGE_RATIO = _threshold(
    "error_page_ratio", 0.05, RATIO, "An outage for some users, which pages."
)
ERROR_TICKET_RATIO = _threshold(
    "error_ticket_ratio", 0.01, RATIO, "A fault that can wait for the morning."
)
INVALID_RATIO = _threshold(
    "invalid_ratio", 0.9, RATIO, "Some clients always get something wrong; here hardly any do not."
)
QUEUE_REQUESTS = _threshold(
    "queue_requests", DEEP_QUEUE, "requests", "A queue that stays longer needs another replica."
)
KV_CACHE_RATIO = _threshold(
    "kv_cache_ratio",
    FULL_CACHE,
    RATIO,
    "A full cache is normal; requests that wait for it are not.",
)
REPLICAS_NEEDED = _threshold(
    "replicas_needed_times", 1, _TIMES, "The load that the replicas were seen to hold."
)
RANK_SKEW = _threshold(
    "rank_skew_times", UNEVEN_RANKS, _TIMES, "The busiest rank has half more than its part."
)
RANK_MIN_REQUESTS = _threshold(
    "rank_min_requests", 4, "requests a rank", "With fewer, chance alone makes ranks uneven."
)
POOL_QUEUE_REQUESTS = _threshold(
    "pool_queue_requests", SHORT_POOL_QUEUE, "requests an engine", "A pool that is too small."
)
POOL_SPARE_REQUESTS = _threshold(
    "pool_spare_requests",
    ROOM_POOL_QUEUE,
    "requests an engine",
    "If as many wait in the other pool, too, another engine of one would only move the queue.",
)
CACHE_DROP_RATIO = _threshold(
    "prefix_cache_drop_ratio", 0.5, RATIO, "Hits now, of those that are usual over a day."
)
CACHE_USUAL_RATIO = _threshold(
    "prefix_cache_usual_ratio", 0.1, RATIO, "With fewer usual hits there is nothing to lose."
)
MIN_TOKENS = _threshold(
    "cache_min_tokens", 10_000, "tokens", "Of fewer tokens in half an hour a ratio says little."
)
OFFLOAD = _threshold(
    "offload_times", 1, _TIMES, "Loading KV values takes as long as computing them."
)
DRAFT_TOKENS = _threshold(
    "draft_tokens", 0.1, "tokens a draft", "With so few accepted tokens drafts cannot pay."
)
MIN_DRAFTS = _threshold("min_drafts", 1000, "drafts", "Of fewer in half an hour it says little.")
RESTARTS = _threshold(
    "restart_count",
    2.5,
    "restarts in 30 minutes",
    "Three restarts: increase() extrapolates, so their count is no whole number.",
)
IN_ROTATION_RATIO = _threshold(
    "in_rotation_ratio", 0.5, RATIO, "Half of the time or of the proxy's workers."
)
SPANS_REJECTED_RATIO = _threshold(
    "spans_rejected_ratio", 0.01, RATIO, "Senders of a wrong version reject all, noise far less."
)
STORE_WAIT_S = _threshold(
    "store_wait_seconds", 30, "seconds", "A row's usual wait for its commit is below a second."
)
LATE_S = _threshold(
    "agent_late_seconds", 900, "seconds", "Folding and minutes are some minutes late on purpose."
)
GPU_THROTTLED_RATIO = _threshold(
    "gpu_throttled_ratio", 0.1, RATIO, "A tenth of the time is a tenth of the speed at most."
)
GPU_FREE_RATIO = _threshold(
    "gpu_free_memory_ratio", 0.01, RATIO, "Engines leave some per cent; below, allocations fail."
)
GPU_IDLE_RATIO = _threshold("gpu_idle_ratio", 0.05, RATIO, "An engine with requests uses more.")
GPU_HELD_RATIO = _threshold(
    "gpu_held_ratio", 0.1, RATIO, "Memory in use: an engine holds the GPU, not a context alone."
)
GPU_XIDS = _threshold(
    "gpu_xid_count", 3, "Xids in an hour", "A single one is the end of a single program."
)


def filled(text: str, values: Mapping[str, Decimal]) -> str:
    """The text with the value of each threshold, or its default."""

    def value(found: re.Match[str]) -> str:
        number = values.get(found[1], THRESHOLDS[found[1]].default)
        return f"{number.normalize():f}"

    return _PLACE.sub(value, text)


def used_in(text: str) -> set[str]:
    """The names of the thresholds in a text that is not filled yet."""
    return set(_PLACE.findall(text))
