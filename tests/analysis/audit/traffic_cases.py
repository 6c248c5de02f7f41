"""Deployments whose traffic does not fit their limits, and what the checks find."""

from dataclasses import replace
from typing import Any

from agent.catalog import engine_facts as fact
from agent.catalog.engines.vllm import DURATION_EDGES_S
from agent.records.audit import (
    AgentEvidence,
    AuditEvidence,
    CommandLine,
    EvidencePart,
    LatencyLimits,
    LoadHistory,
)
from tests.analysis.audit.deployments import (
    FILE_FLAGS,
    IDLE,
    NO_FLAGS,
    NO_LIMITS,
    NO_STATISTICS,
    OFF,
    AuditCase,
    fails,
    passes,
    unknown,
    warns,
)
from tests.analysis.audit.evidence import (
    LENGTH_EDGES,
    STEP_EDGES,
    command_line,
    engine,
    evidence,
    histogram,
    sample,
    watched,
    with_engine,
    with_facts,
)

_RANKS = fact.DATA_PARALLEL_RANKS


def _lengths(
    inputs: list[float], outputs: list[float], *, cut: float, stopped: float
) -> AuditEvidence:
    base = with_facts(
        {(fact.REQUESTS_FINISHED, ("length",)): cut, (fact.REQUESTS_FINISHED, ("stop",)): stopped}
    )
    return evidence(
        agent=None,
        engine=engine(
            sample=base.engine.sample,
            input_lengths=histogram(inputs, LENGTH_EDGES),
            output_lengths=histogram(outputs, LENGTH_EDGES),
        ),
    )


def _waited(*waited_s: float) -> AuditEvidence:
    """No request waits now, and earlier ones waited so long."""
    idle = with_facts({fact.REQUESTS_WAITING: 0.0, fact.REQUESTS_RUNNING: 0.0}).engine.sample
    assert idle is not None
    waits = {**idle.histograms, fact.QUEUE_TIME.name: histogram(waited_s, DURATION_EDGES_S)}
    return with_engine(sample=replace(idle, histograms=waits))


_WAITED = _waited(*[0.1] * 94, *[0.6] * 6)


def _batch(most: int) -> CommandLine:
    return command_line(limits={fact.MAX_RUNNING_REQUESTS.name: most})


def _rows(*lengths: tuple[int, int]) -> AuditEvidence:
    return evidence(agent=AgentEvidence(lengths=lengths, engine_views=len(lengths), plugin=True))


_DRAFTS = {
    fact.SPEC_DECODE_DRAFTS: 100.0,
    fact.SPEC_DECODE_DRAFT_TOKENS: 400.0,
    fact.SPEC_DECODE_ACCEPTED_TOKENS: 300.0,
}


def _hour(**load: float) -> AgentEvidence:
    """An agent whose samples of the last hour say this, and that no more requests ran than 30."""
    hour = {"covered_s": 3600.0, "waiting": 0.0, "running": 30.0, "cache_usage": 0.3, **load}
    return replace(watched(), load=LoadHistory(**hour))


def _budget(tokens: int, **others: Any) -> AuditEvidence:
    line = command_line(limits={fact.MAX_STEP_TOKENS.name: tokens})
    return evidence(command_line=line, **others)


TRAFFIC_CASES: dict[str, list[AuditCase]] = {
    "--max-model-len": [
        fails(
            _rows((2000, 48), *[(150, 50)] * 99),
            "1 of 100 (1 %) reached it", "raise --max-model-len above 2048",
        ),
        warns(_rows((2000, 48), *[(150, 50)] * 100), "1 of 101"),
        passes(_rows((2000, 47)), "had 2047"),
        fails(
            _lengths([1500.0] * 9, [500.0] * 9, cut=9.0, stopped=0.0),
            "requests have 2,000, 9 of 9 (100 %) ended by a length",
            "raise --max-model-len above 2048",
        ),
        passes(_lengths([1500.0] * 9, [548.0] * 9, cut=0.0, stopped=9.0), "none reached it"),
        passes(_lengths([500.0] * 9, [500.0] * 9, cut=9.0, stopped=0.0), "none reached it"),
        unknown(
            _lengths([1500.0] * 9, [100.0] * 9, cut=1.0, stopped=8.0),
            "by the client's max_tokens", "--agent",
        ),
        unknown(IDLE, "no request has finished"),
        unknown(NO_STATISTICS, f"2048 tokens; {OFF}"),
        unknown(with_engine(max_model_len=None), "does not name max_model_len"),
        unknown(
            replace(
                with_engine(max_model_len=None),
                unread={EvidencePart.MODELS: "/v1/models responds with HTTP status 401"},
            ),
            "/v1/models responds with HTTP status 401",
        ),
    ],
    "refused requests": [
        warns(
            with_engine(answered={"2xx": 90.0, "4xx": 10.0}),
            "10 of 100 (10 %)", "--max-model-len",
        ),
        fails(
            evidence(
                engine=engine(
                    answered={"2xx": 90.0, "5xx": 10.0},
                    sample=with_facts(
                        {(fact.ADMISSION_REJECTIONS, ("max_num_queued_reqs",)): 10.0}
                    ).engine.sample,
                )
            ),
            "10 of 100 (10 %)", "--max-num-queued-reqs",
        ),
        fails(with_engine(answered={"4xx": 3.0}), "3 of 3 (100 %)", "read the engine's log"),
        fails(
            with_engine(answered={"2xx": 90.0, "5xx": 10.0}),
            "0 of 100 (0 %) since the engine's start; 10 of 100 (10 %) failed with a 5xx",
            "the engine's log for errors",
        ),
        unknown(with_engine(answered={}), "no request for text"),
        # vLLM counts none before the first one; a front that counts none is another matter.
        unknown(replace(IDLE, engine=replace(IDLE.engine, answered=None)), "no request for text"),
        unknown(with_engine(answered=None), "does not contain it"),
        unknown(NO_STATISTICS, OFF),
    ],
    "queue": [
        passes(with_facts({fact.REQUESTS_WAITING: 10.0}), "10 requests wait"),
        warns(with_facts({fact.REQUESTS_WAITING: 11.0}), "11 requests wait", "add a replica"),
        passes(
            with_facts({}, agent=_hour(waiting=1.25, waited_over_s=0.2, waited_within_s=0.2)),
            "2 requests wait now; in the last hour 1.2 on average; 95 % waited 0.2 s at most",
        ),
        warns(
            with_facts({fact.REQUESTS_WAITING: 0.0}, agent=_hour(waiting=10.5)),
            "0 requests wait now; in the last hour 10.5 on average", "add a replica",
        ),
        warns(
            with_facts(
                {fact.REQUESTS_WAITING: 0.0},
                agent=_hour(covered_s=720.0, waited_over_s=0.3, waited_within_s=0.3),
            ),
            "in 12 min of the last hour 0.0 on average; 5 % waited over 0.3 s, beyond a TTFT of "
            "0.25 s",
            "add a replica",
        ),
        # Without an agent the engine's histogram says it, of the time since its start.
        warns(_WAITED, "start 5 % waited over 0.5 s, beyond a TTFT"),
        # In the bucket of the limit: whether it is too long is not known.
        passes(_waited(*[0.1] * 94, *[0.29] * 6), "start 95 % waited 0.3 s at most"),
        unknown(NO_STATISTICS, OFF),
    ],
    "--max-num-seqs": [
        warns(
            with_facts({fact.REQUESTS_RUNNING: 64.0, fact.KV_CACHE_USAGE: 0.2}),
            "64 of 64 run now, 2 wait, KV cache 20 % full", "raise --max-num-seqs above 64",
        ),
        warns(
            with_engine(step_tokens=histogram([5.0] * 1000, STEP_EDGES)),
            "never over 8 in 1,000 steps", "--max-num-seqs 16",
        ),
        passes(with_engine(step_tokens=histogram([5.0] * 999, STEP_EDGES)), "40 of"),
        unknown(NO_FLAGS, "40 run now; the engine is not on this machine"),
        unknown(FILE_FLAGS, "--config names a file of flags"),
        unknown(
            evidence(command_line=NO_LIMITS),
            "40 run now; not given, so vLLM chose it: 256, or 1,024 on large GPUs",
            "give --max-num-seqs",
        ),
        passes(
            evidence(
                command_line=NO_LIMITS, stated_limits={fact.MAX_RUNNING_REQUESTS.name: 64}
            ),
            "40 of 64 run now",
        ),
        passes(
            with_facts({fact.REQUESTS_RUNNING: 0.0}, agent=_hour(running=57.0, waiting=3.0,
                                                                 cache_usage=0.5)),
            "0 of 64 run now, 57.0 on average in the last hour",
        ),
        warns(
            with_facts({fact.REQUESTS_RUNNING: 0.0, fact.REQUESTS_WAITING: 0.0},
                       agent=_hour(running=60.0, waiting=3.0)),
            "0 of 64 run now, 60.0 on average in the last hour, 3 wait, KV cache 30 % full",
            "raise --max-num-seqs above 64",
        ),
        unknown(NO_STATISTICS, OFF),
        warns(
            replace(_WAITED, command_line=_batch(2)),
            "0 of 2 run now; 5 % waited over 0.5 s beside a KV cache for 2,621",
            "raise --max-num-seqs above 2",
        ),
        # A batch of the size that vLLM chooses is another matter, and so are short waits.
        passes(replace(_WAITED, command_line=_batch(64)), "0 of 64 run now"),
        # The cache holds seven such requests.
        passes(
            replace(
                _WAITED,
                command_line=_batch(2),
                engine=replace(
                    _WAITED.engine, input_lengths=histogram([70_000.0] * 9, LENGTH_EDGES)
                ),
            ),
            "0 of 2 run now",
        ),
        passes(
            replace(_WAITED, command_line=_batch(2), limits=LatencyLimits(ttft_s=(1.0,))),
            "0 of 2 run now",
        ),
        warns(
            with_facts({fact.REQUESTS_RUNNING: 256.0, fact.KV_CACHE_USAGE: 0.2, _RANKS: 4.0}),
            "256 of 256 run now, 2 wait, KV cache 20 % full", "raise --max-num-seqs above 64",
        ),
        # A step of one of eight ranks may have 64 requests in it, and had as many.
        passes(
            with_engine(
                sample=sample({_RANKS: 8.0}), step_tokens=histogram([64.0] * 1000, STEP_EDGES)
            ),
            "40 of 512 run now",
        ),
    ],
    "step budget": [
        passes(_budget(512), "512 tokens; the mean prompt of 150 needs 1 step"),
        warns(
            _budget(64), "64 tokens; the mean prompt of 150 needs 3 steps",
            "remove --max-num-batched-tokens, or set it to 2048",
        ),
        # A CPU computes no faster than it reads.
        passes(_budget(64, gpus=()), "64 tokens"),
        passes(
            evidence(command_line=NO_LIMITS),
            "not given, so vLLM chose it: 2,048 to 16,384 by the GPU",
        ),
        warns(
            evidence(
                engine=engine(sample=sample({fact.MAX_STEP_TOKENS: 256.0})), command_line=None
            ),
            "256 tokens",
        ),
        unknown(NO_FLAGS, "the engine is not on this machine"),
        unknown(FILE_FLAGS, "--config names a file of flags"),
    ],
    "chunked prefill": [
        warns(
            evidence(command_line=command_line(no_enable_chunked_prefill="")),
            "off", "remove --no-enable-chunked-prefill",
        ),
        unknown(FILE_FLAGS, "--config names a file of flags"),
    ],
    "speculation depth": [
        passes(with_facts(_DRAFTS), "4.0 tokens in a draft, 300 of 400"),
        warns(
            with_facts(
                {**_DRAFTS, fact.SPEC_DECODE_ACCEPTED_TOKENS: 100.0},
                command_line=command_line(speculative_config='{"method": "ngram"}'),
            ),
            "100 of 400 (25 %) accepted",
            """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
        ),
        warns(
            with_facts({**_DRAFTS, fact.SPEC_DECODE_DRAFT_TOKENS: 560.0}),
            "5.6 tokens in a draft", "num_speculative_tokens 5",
        ),
        warns(
            with_facts(
                {
                    **_DRAFTS,
                    fact.SPEC_DECODE_DRAFT_TOKENS: 200.0,
                    fact.SPEC_DECODE_ACCEPTED_TOKENS: 180.0,
                }
            ),
            "2.0 tokens in a draft", "num_speculative_tokens 3",
        ),
        passes(
            with_facts(
                {
                    **_DRAFTS,
                    fact.SPEC_DECODE_DRAFT_TOKENS: 200.0,
                    fact.SPEC_DECODE_ACCEPTED_TOKENS: 150.0,
                }
            ),
            "2.0 tokens in a draft",
        ),
        unknown(
            with_facts({**_DRAFTS, fact.SPEC_DECODE_DRAFTS: 0.0}),
            "no draft has been verified",
        ),
    ],
    "client time-outs": [
        passes(
            evidence(agent=watched(1.5, 2.9, 7.0, 7.1, 12.0, 30.0, 55.0)),
            "clients left 7 of 900 (0.778 %), and no time-out shows",
        ),
        passes(evidence(agent=watched(*[0.2] * 9)), "no time-out shows"),
        warns(
            evidence(agent=watched(2.0, 30.01, 30.02, 30.0, 30.3, 30.05, 9.0)),
            "clients left 7 of 900 (0.778 %), 5 of them after 30 s", "raise the time-out",
        ),
        unknown(evidence(agent=None), "agent"),
        unknown(
            evidence(agent=AgentEvidence(requests=9)),
            "no request came through the proxy", "goodput-agent-vllm",
        ),
        unknown(evidence(agent=AgentEvidence(left_after_s=())), "has no request"),
    ],
    "warm-up": [
        unknown(evidence(agent=None), "agent"),
        unknown(evidence(agent=AgentEvidence()), "has no request"),
        warns(
            evidence(agent=AgentEvidence(requests=900, cold=12)),
            "12 requests missed because the engine had just started",
            "before the engine gets traffic",
        ),
    ],
}  # fmt: skip
