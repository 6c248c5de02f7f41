"""The dialect of one kind of engine: its series for each fact, as data."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field

from agent.catalog import engine_facts as fact
from agent.catalog.metric import Merge, Metric


@dataclass(frozen=True, slots=True)
class Spelling:
    """One series of a fact; of a histogram, its name before `_bucket`.

    `labels` maps our label to the engine's if they differ. `only` names the label values that
    count. `number_in` names the label with the number, for series whose value is always 1; `words`
    maps words in that label to numbers. `zero_means_off`: the value 0 is unknown. `merge` replaces
    the fact's own rule. `also` are series that are added to it. With `implies` the fact is 1 with
    these values of our labels wherever the series is there. `shared`: other programs publish the
    series too, so that it does not show which engine this is.
    """

    series: str
    _: KW_ONLY
    labels: Mapping[str, str] = field(default_factory=dict)
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    number_in: str | None = None
    words: Mapping[str, float] = field(default_factory=dict)
    zero_means_off: bool = False
    merge: Merge | None = None
    also: tuple[str, ...] = ()
    implies: Mapping[str, str] = field(default_factory=dict)
    shared: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    """One kind of engine: its path, its series per fact (newest first), its ranks.

    An exposition with a series of `facts` that is not `shared` is in this dialect; `facts` use the
    first of `prefixes`. `occasional` are the facts that depend on the engine's settings or on its
    requests: an exposition without them does not show a renamed series. `no_models` are values of
    `model_labels` that name no model. Each of `replicas` is a whole engine, whose series another
    program collects. Each rank in `merged_ranks` does its own work; each rank in
    `mirrored_ranks` repeats the values of the lowest one. Of a gauge with a label of `totals`, the
    series with the value given there is the total of the others, and counts alone; series without
    a total are summed. A series with the label `foreign` and without the label `own` comes from
    another program and never counts. The tokens in `counted_at_end` are counted when their request
    ends, others as they come.
    """

    engine: str
    prefixes: tuple[str, ...]
    facts: Mapping[Metric, tuple[Spelling, ...]]
    occasional: frozenset[Metric] = frozenset()
    metrics_path: str = "/metrics"
    model_path: str = "/v1/models"
    model_labels: tuple[str, ...] = ()
    no_models: frozenset[str] = frozenset()
    replicas: tuple[str, ...] = ()
    merged_ranks: tuple[str, ...] = ()
    mirrored_ranks: tuple[str, ...] = ()
    totals: Mapping[str, str] = field(default_factory=dict)
    foreign: str | None = None
    own: str | None = None
    counted_at_end: frozenset[Metric] = frozenset()


# Prometheus client libraries publish this for every process, without a prefix.
PROCESS_FACTS: Mapping[Metric, tuple[Spelling, ...]] = {
    fact.PROCESS_START_TIME: (Spelling("process_start_time_seconds", shared=True),),
}

# Ray publishes the series of all replicas of a node together.
RAY_REPLICAS = ("ReplicaId", "WorkerId")

# Facts that any engine gives only with certain settings or after certain requests. An exposition of
# several processes, such as SGLang's and that of vLLM with --api-server-count, has no start time.
OFTEN_ABSENT = frozenset(
    {
        fact.PROCESS_START_TIME,
        fact.REQUESTS_FAILED,
        fact.REQUESTS_ABORTED,
        fact.ADMISSION_REJECTIONS,
        fact.KV_VALUE_BYTES,
        fact.KV_TRANSFER_TIME,
        fact.KV_TRANSFER_BYTES,
        fact.KV_TRANSFERS_FAILED,
        fact.KV_OFFLOAD_CAPACITY_TOKENS,
        fact.KV_OFFLOAD_CAPACITY_BYTES,
        fact.KV_OFFLOAD_PROMOTION_TIME,
        fact.KV_OFFLOAD_LOAD_TIME,
        fact.KV_OFFLOAD_LOAD_BYTES,
        fact.KV_OFFLOAD_TIER_READ_TIME,
        fact.KV_OFFLOAD_TIER_QUERIES,
        fact.KV_OFFLOAD_TIER_HITS,
        fact.EXTERNAL_CACHE_QUERY_TOKENS,
        fact.EXTERNAL_CACHE_HIT_TOKENS,
        fact.SPEC_DECODE_ACCEPTED_BY_POSITION,
        fact.SPEC_DECODE_DRAFTS,
        fact.SPEC_DECODE_DRAFT_TOKENS,
        fact.SPEC_DECODE_ACCEPTED_TOKENS,
        fact.ESTIMATED_GPU_FLOPS,
        fact.ESTIMATED_GPU_READ_BYTES,
        fact.ESTIMATED_GPU_WRITE_BYTES,
    }
)
