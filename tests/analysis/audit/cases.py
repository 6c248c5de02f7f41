"""Deployments with one thing changed, and what the check on it finds."""

from dataclasses import dataclass

from agent.analysis.audit.checks import AuditFinding
from agent.catalog import engine_facts as fact
from agent.records.audit import AgentEvidence, AuditEvidence, EvidencePart, LatencyLimits
from tests.analysis.audit.evidence import (
    LENGTH_EDGES,
    STEP_EDGES,
    command_line,
    engine,
    evidence,
    histogram,
    trial,
    watched,
    with_engine,
    with_facts,
)

PASS, WARN, FAIL, UNKNOWN = AuditFinding


@dataclass(frozen=True, slots=True)
class AuditCase:
    """What the check of this name finds; `seen` and `change` are parts of its texts."""

    check: str
    finding: AuditFinding
    of: AuditEvidence
    seen: str
    change: str | None = None


NO_EXPOSITION = evidence(
    engine=engine(sample=None, cache_config={}, answered=None, input_lengths=None),
    unread={EvidencePart.EXPOSITION: "/metrics has no series of a known engine (no_known_series)"},
)
NO_FLAGS = evidence(
    command_line=None, unread={EvidencePart.COMMAND_LINE: "the engine is not on this machine"}
)
FILE_FLAGS = evidence(command_line=command_line(whole=False, limits={}))
NO_GPUS = evidence(gpus=None, unread={EvidencePart.GPUS: "no GPU can be read: no_library"})
IDLE = with_facts(
    {(fact.REQUESTS_FINISHED, ("stop",)): 0.0, (fact.REQUESTS_WAITING, ()): 0.0}, agent=None
)


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


def _rows(*lengths: tuple[int, int]) -> AuditEvidence:
    return evidence(agent=AgentEvidence(lengths=lengths, engine_views=len(lengths), plugin=True))


CACHE_CASES = (
    AuditCase(
        "prefix caching", FAIL, with_engine(cache_config={"enable_prefix_caching": "False"}),
        "off", "remove --no-enable-prefix-caching",
    ),
    AuditCase(
        "prefix caching", FAIL,
        evidence(
            engine=engine(cache_config={}),
            command_line=command_line(no_enable_prefix_caching=""),
        ),
        "off", "remove --no-enable-prefix-caching",
    ),
    AuditCase("prefix caching", UNKNOWN, NO_EXPOSITION, "no series of a known engine"),
    AuditCase(
        "size for the traffic", WARN, with_facts({(fact.KV_CAPACITY_TOKENS, ()): 10_000.0}),
        "50.0 of the mean 200 tokens; --max-num-seqs 64", "lower --max-num-seqs to 50",
    ),
    AuditCase(
        "size for the traffic", FAIL, with_facts({(fact.KV_CAPACITY_TOKENS, ()): 300.0}),
        "1.5 of the mean 200 tokens", "--gpu-memory-utilization",
    ),
    AuditCase(
        "size for the traffic", FAIL,
        with_engine(cache_config={"num_gpu_blocks_override": "3"}),
        "cut to 3 blocks", "remove --num-gpu-blocks-override",
    ),
    AuditCase(
        "size for the traffic", PASS,
        with_facts(
            {(fact.KV_CAPACITY_TOKENS, ()): None, (fact.KV_BLOCKS, ()): 4096.0,
             (fact.KV_BLOCK_TOKENS, ()): 16.0}
        ),
        "65,536 tokens",
    ),
    AuditCase(
        "size for the traffic", UNKNOWN,
        with_engine(input_lengths=None, max_model_len=131_072), "no request has finished",
    ),
    AuditCase("preemptions", WARN, with_facts({(fact.PREEMPTIONS, ()): 8.0}), "8 in 900", "fp8"),
    AuditCase("preemptions", FAIL, with_facts({(fact.PREEMPTIONS, ()): 9.0}), "9 in 900", "fp8"),
    AuditCase("preemptions", UNKNOWN, IDLE, "no request has finished"),
    AuditCase("usage", FAIL, with_facts({(fact.KV_CACHE_USAGE, ()): 0.95}), "95 %", "fp8"),
    AuditCase(
        "usage", WARN,
        with_facts({(fact.KV_CACHE_USAGE, ()): 1.0, (fact.REQUESTS_WAITING, ()): 0.0}),
        "100 % now, 0 requests wait", "fp8",
    ),
    AuditCase(
        "memory fraction", WARN, with_engine(cache_config={"gpu_memory_utilization": "0.5"}),
        "0.5", "--gpu-memory-utilization 0.85",
    ),
    AuditCase(
        "memory fraction", WARN, with_engine(cache_config={"gpu_memory_utilization": "0.98"}),
        "0.98", "--gpu-memory-utilization 0.95",
    ),
    AuditCase("memory fraction", UNKNOWN, evidence(gpus=()), "the engine has no GPU"),
)  # fmt: skip

TRAFFIC_CASES = (
    AuditCase(
        "--max-model-len", FAIL, _rows((2000, 48), *[(150, 50)] * 99),
        "1 of 100 (1 %) reached it", "raise --max-model-len above 2048",
    ),
    AuditCase("--max-model-len", WARN, _rows((2000, 48), *[(150, 50)] * 100), "1 of 101"),
    AuditCase("--max-model-len", PASS, _rows((2000, 47)), "had 2047"),
    AuditCase(
        "--max-model-len", FAIL, _lengths([1500.0] * 9, [500.0] * 9, cut=9.0, stopped=0.0),
        "requests have 2,000, 9 of 9 (100 %) ended by a length", "raise --max-model-len above 2048",
    ),
    AuditCase(
        "--max-model-len", PASS, _lengths([1500.0] * 9, [548.0] * 9, cut=0.0, stopped=9.0),
        "none reached it",
    ),
    AuditCase(
        "--max-model-len", PASS, _lengths([500.0] * 9, [500.0] * 9, cut=9.0, stopped=0.0),
        "none reached it",
    ),
    AuditCase(
        "--max-model-len", UNKNOWN, _lengths([1500.0] * 9, [100.0] * 9, cut=1.0, stopped=8.0),
        "by the client's max_tokens", "--agent",
    ),
    AuditCase("--max-model-len", UNKNOWN, IDLE, "no request has finished"),
    AuditCase(
        "--max-model-len", UNKNOWN, with_engine(max_model_len=None), "does not name max_model_len"
    ),
    AuditCase(
        "refused requests", WARN, with_engine(answered={"2xx": 90.0, "4xx": 10.0}),
        "10 of 100 (10 %)", "--max-model-len",
    ),
    AuditCase(
        "refused requests", FAIL,
        evidence(
            engine=engine(
                answered={"2xx": 90.0, "5xx": 10.0},
                sample=with_facts({(fact.ADMISSION_REJECTIONS, ("max_num_queued_reqs",)): 10.0})
                .engine.sample,
            )
        ),
        "10 of 100 (10 %)", "--max-num-queued-reqs",
    ),
    AuditCase("refused requests", UNKNOWN, with_engine(answered={}), "no request for text"),
    AuditCase("queue", PASS, with_facts({(fact.REQUESTS_WAITING, ()): 10.0}), "10 requests wait"),
    AuditCase(
        "queue", WARN, with_facts({(fact.REQUESTS_WAITING, ()): 11.0}), "11 requests wait",
        "add a replica",
    ),
    AuditCase(
        "--max-num-seqs", WARN,
        with_facts({(fact.REQUESTS_RUNNING, ()): 64.0, (fact.KV_CACHE_USAGE, ()): 0.2}),
        "64 of 64 run now, 2 wait, KV cache 20 % full", "raise --max-num-seqs above 64",
    ),
    AuditCase(
        "--max-num-seqs", WARN, with_engine(step_tokens=histogram([5.0] * 1000, STEP_EDGES)),
        "never over 8 in 1,000 steps", "--max-num-seqs 16",
    ),
    AuditCase(
        "--max-num-seqs", PASS, with_engine(step_tokens=histogram([5.0] * 999, STEP_EDGES)), "40 of"
    ),
    AuditCase("--max-num-seqs", UNKNOWN, NO_FLAGS, "the engine is not on this machine"),
    AuditCase("--max-num-seqs", UNKNOWN, FILE_FLAGS, "in a file (--config)"),
    AuditCase(
        "chunked prefill", WARN, evidence(command_line=command_line(no_enable_chunked_prefill="")),
        "off", "remove --no-enable-chunked-prefill",
    ),
    AuditCase("chunked prefill", UNKNOWN, FILE_FLAGS, "in a file (--config)"),
)  # fmt: skip

_DRAFTS = {
    (fact.SPEC_DECODE_DRAFTS, ()): 100.0,
    (fact.SPEC_DECODE_DRAFT_TOKENS, ()): 400.0,
    (fact.SPEC_DECODE_ACCEPTED_TOKENS, ()): 300.0,
}
SPECULATION_CASES = (
    AuditCase("speculation depth", PASS, with_facts(_DRAFTS), "4.0 tokens in a draft, 300 of 400"),
    AuditCase(
        "speculation depth", WARN,
        with_facts(
            {**_DRAFTS, (fact.SPEC_DECODE_ACCEPTED_TOKENS, ()): 100.0},
            command_line=command_line(speculative_config='{"method": "ngram"}'),
        ),
        "100 of 400 (25 %) accepted",
        """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3}'""",
    ),
    AuditCase(
        "speculation depth", WARN,
        with_facts({**_DRAFTS, (fact.SPEC_DECODE_DRAFT_TOKENS, ()): 560.0}),
        "5.6 tokens in a draft", "num_speculative_tokens 5",
    ),
    AuditCase(
        "speculation depth", WARN,
        with_facts({**_DRAFTS, (fact.SPEC_DECODE_DRAFT_TOKENS, ()): 200.0,
                    (fact.SPEC_DECODE_ACCEPTED_TOKENS, ()): 180.0}),
        "2.0 tokens in a draft", "num_speculative_tokens 3",
    ),
    AuditCase(
        "speculation depth", PASS,
        with_facts({**_DRAFTS, (fact.SPEC_DECODE_DRAFT_TOKENS, ()): 200.0,
                    (fact.SPEC_DECODE_ACCEPTED_TOKENS, ()): 150.0}),
        "2.0 tokens in a draft",
    ),
    AuditCase(
        "speculation depth", UNKNOWN, with_facts({**_DRAFTS, (fact.SPEC_DECODE_DRAFTS, ()): 0.0}),
        "no draft has been verified",
    ),
)  # fmt: skip

WATCHING_CASES = (
    AuditCase("statistics", FAIL, NO_EXPOSITION, "no series", "remove --disable-log-stats"),
    AuditCase(
        "expected series", WARN, with_facts({(fact.OUTPUT_TOKENS, ()): None}),
        "1 of 26 absent: llm_engine_output_tokens", "renamed",
    ),
    AuditCase(
        "expected series", UNKNOWN,
        with_facts({(fact.OUTPUT_TOKENS, ()): None, (fact.REQUESTS_FINISHED, ("stop",)): 0.0}),
        "some come with the first request", "send a request",
    ),
    AuditCase(
        "bucket edges", WARN, evidence(limits=LatencyLimits(ttft_s=(0.2,), e2e_s=(5.0,))),
        "ttft 0.2 s is between the edges 0.1 and 0.25",
        """--custom-histogram-buckets '{"time_to_first_token": [0.001, 0.005, 0.01, 0.02, 0.04, """
        "0.06, 0.08, 0.1, 0.2, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, "
        "640.0, 2560.0]}'",
    ),
    AuditCase(
        "bucket edges", WARN,
        evidence(engine=engine(version="0.31.2"), limits=LatencyLimits(tpot_s=(0.005, 100.0))),
        "tpot 0.005 s is between the edges 0 and 0.01; tpot 100 s is above the last edge, 80",
        "vLLM 0.32.0 or newer, with "
        """--custom-histogram-buckets '{"inter_token_latency": [0.005, """,
    ),
    AuditCase("bucket edges", UNKNOWN, evidence(limits=LatencyLimits()), "no objective"),
    AuditCase("spans", PASS, evidence(trial=None), "its 900 newest requests"),
    AuditCase(
        "spans", FAIL, evidence(trial=trial(span_lead_s=None, waited_s=20.0)),
        "none within 20 s of a request", "--otlp-traces-endpoint",
    ),
    AuditCase(
        "spans", FAIL,
        evidence(
            trial=trial(span_lead_s=None), command_line=command_line(otlp_traces_endpoint="")
        ),
        "has no --otlp-traces-endpoint", "--otlp-traces-endpoint http://AGENT:4317",
    ),
    AuditCase(
        "spans", UNKNOWN, evidence(trial=trial(span_lead_s=None, problem="HTTP 500")), "HTTP 500"
    ),
    AuditCase(
        "spans", UNKNOWN, evidence(trial=trial(span_lead_s=None), agent=None), "agent", "--agent"
    ),
    AuditCase(
        "spans", UNKNOWN,
        evidence(
            trial=None, agent=AgentEvidence(plugin=True),
            unread={EvidencePart.REQUEST: "no request was sent"},
        ),
        "no request was sent", "--send-request",
    ),
    AuditCase(
        "clocks", WARN, evidence(trial=trial(span_lead_s=-3.0)), "3.0 s behind by the span",
        "chrony",
    ),
    AuditCase(
        "clocks", FAIL, evidence(trial=trial(span_lead_s=90.0)), "90.0 s ahead by the span",
        "chrony",
    ),
    AuditCase(
        "clocks", FAIL, evidence(engine=engine(date_lead_s=-7.5), trial=None),
        "7.5 s behind by HTTP's Date", "chrony",
    ),
    AuditCase(
        "clocks", UNKNOWN, evidence(engine=engine(sample=None, date_lead_s=None), trial=None),
        "no span has arrived",
    ),
    AuditCase(
        "plugin", WARN, evidence(agent=AgentEvidence()),
        "has no plugin_socket", "pip install ./plugins/vllm",
    ),
    AuditCase(
        "plugin", WARN, evidence(agent=AgentEvidence(plugin=False)), "hears nothing", "pip install"
    ),
    AuditCase("plugin", UNKNOWN, evidence(agent=None), "agent"),
)  # fmt: skip

SAFETY_CASES = (
    AuditCase(
        "security notices", WARN, with_engine(version="0.31.0"),
        "GHSA-542m-9234-8gvf (medium", "vLLM 0.32.0 or newer; https://github.com/vllm-project/",
    ),
    AuditCase(
        "security notices", FAIL, with_engine(version="0.21.0"),
        "GHSA-94f4-hr76-p5j6 (critical", "vLLM 0.32.0 or newer",
    ),
    AuditCase("security notices", UNKNOWN, with_engine(version=None), "version"),
    AuditCase(
        "access", PASS,
        evidence(engine=engine(needs_key=False), addresses=frozenset({"127.0.0.1", "::1"})),
        "which only this machine reaches",
    ),
    AuditCase(
        "access", WARN,
        evidence(engine=engine(needs_key=False), addresses=frozenset({"0.0.0.0", "127.0.0.1"})),
        "no key is needed at 0.0.0.0, 127.0.0.1", "--api-key",
    ),
    AuditCase("access", UNKNOWN, with_engine(needs_key=None), "models"),
    AuditCase(
        "access", UNKNOWN, evidence(engine=engine(needs_key=False), addresses=None),
        "no key is needed; ",
    ),
    AuditCase(
        "access",
        WARN,
        evidence(engine=engine(needs_key=False), addresses=None, remote=True),
        "we reach it from another machine",
        "--api-key",
    ),
    AuditCase("health", FAIL, with_engine(health=503), "/health gives 503", "restart"),
    AuditCase("health", FAIL, with_engine(health=None), "does not answer", "restart"),
    AuditCase(
        "graceful stop", WARN, evidence(command_line=command_line(shutdown_timeout="0")),
        "0 s: running requests are aborted", "--shutdown-timeout 30",
    ),
    AuditCase(
        "graceful stop", UNKNOWN,
        evidence(engine=engine(version="0.31.0"), command_line=command_line(shutdown_timeout="")),
        "0.32.0 and newer only",
    ),
)  # fmt: skip

TIME_OUT_CASES = (
    AuditCase(
        "client time-outs", PASS, evidence(agent=watched(1.5, 2.9, 7.0, 7.1, 12.0, 30.0, 55.0)),
        "clients left 7 of 900 (0.778 %), and no time-out shows",
    ),
    AuditCase("client time-outs", PASS, evidence(agent=watched(*[0.2] * 9)), "no time-out shows"),
    AuditCase(
        "client time-outs", WARN,
        evidence(agent=watched(2.0, 30.01, 30.02, 30.0, 30.3, 30.05, 9.0)),
        "clients left 7 of 900 (0.778 %), 5 of them after 30 s", "raise the time-out",
    ),
    AuditCase("client time-outs", UNKNOWN, evidence(agent=None), "agent"),
    AuditCase("warm-up", UNKNOWN, evidence(agent=None), "agent"),
    AuditCase("warm-up", UNKNOWN, evidence(agent=AgentEvidence()), "has no request"),
    AuditCase(
        "warm-up", WARN, evidence(agent=AgentEvidence(requests=900, cold=12)),
        "12 requests missed because the engine had just started", "before the engine gets traffic",
    ),
    AuditCase(
        "client time-outs", UNKNOWN, evidence(agent=AgentEvidence(requests=9)),
        "no request came through the proxy", "goodput-agent-vllm",
    ),
    AuditCase(
        "client time-outs", UNKNOWN, evidence(agent=AgentEvidence(left_after_s=())),
        "has no request",
    ),
)  # fmt: skip

CASES = (
    *TIME_OUT_CASES, *CACHE_CASES, *TRAFFIC_CASES, *SPECULATION_CASES, *WATCHING_CASES,
    *SAFETY_CASES,
)  # fmt: skip
