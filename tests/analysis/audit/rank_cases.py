"""Deployments with several data-parallel ranks, each with a batch and a KV cache of its own."""

from agent.catalog import engine_facts as fact
from tests.analysis.audit.cases import PASS, WARN, AuditCase
from tests.analysis.audit.evidence import STEP_EDGES, histogram, sample, with_engine, with_facts

_RANKS = (fact.DATA_PARALLEL_RANKS, ())

RANK_CASES = (
    # 50 requests in the caches of four ranks: each rank has room for 12.
    AuditCase(
        "size for the traffic", WARN,
        with_facts({(fact.KV_CAPACITY_TOKENS, ()): 10_000.0, _RANKS: 4.0}),
        "50.0 of the mean 200 tokens; --max-num-seqs 64 on each of 4 ranks",
        "lower --max-num-seqs to 12",
    ),
    AuditCase(
        "--max-num-seqs", WARN,
        with_facts(
            {(fact.REQUESTS_RUNNING, ()): 256.0, (fact.KV_CACHE_USAGE, ()): 0.2, _RANKS: 4.0}
        ),
        "256 of 256 run now, 2 wait, KV cache 20 % full", "raise --max-num-seqs above 64",
    ),
    # A step of one of eight ranks may have 64 requests in it, and had as many.
    AuditCase(
        "--max-num-seqs", PASS,
        with_engine(
            sample=sample({_RANKS: 8.0}), step_tokens=histogram([64.0] * 1000, STEP_EDGES)
        ),
        "40 of 512 run now",
    ),
)  # fmt: skip
