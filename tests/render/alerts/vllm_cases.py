"""Cases of alerts for vLLM without an agent."""

from tests.render.alerts.cases import Case, Series, renamed
from tests.render.alerts.engine_cases import PAGE, TICKET
from tests.render.alerts.objective_cases import histogram

INSTANCE = "v:8000"
ON_VLLM = f'job="vllm",instance="{INSTANCE}"'
VLLM = f'{ON_VLLM},model_name="llama",engine="0"'
_ON_TARGET = {"instance": INSTANCE}
_ON_MODEL = {**_ON_TARGET, "model_name": "llama"}
_RUNNING = f"vllm:num_requests_running{{{VLLM}}}"
_UP = f"up{{{ON_VLLM}}}"

# One engine that is read and idle.
AROUND: Series = {_UP: "1x300", _RUNNING: "0x300"}


def _own(**values: str) -> Series:
    return {f"vllm:{name}{{{VLLM}}}": text for name, text in values.items()}


def _latency(name: str, buckets: dict[str, str], count: str) -> Series:
    return histogram(f"vllm:{name}", VLLM, buckets, count)


def _over(alert: str, objective: str, incident: Series, lookalike: Series, p: str) -> Case:
    return Case(
        alert=alert,
        incident=incident,
        lookalike=lookalike,
        minutes=(1, 20, 40),
        labels={**_ON_MODEL, **TICKET, "objective": objective},
        figures=(p,),
    )


_LATENCIES = (
    _over(
        "VllmTtftOverLimit",
        "chat",
        _latency(
            "time_to_first_token_seconds", {"0.25": "0+6x20 120+10x40", "0.5": "0+10x60"}, "0+10x60"
        ),
        # Many over 100 ms, and none surely over 200 ms.
        _latency("time_to_first_token_seconds", {"0.1": "0+1x60", "0.25": "0+10x60"}, "0+10x60"),
        "468.8ms",
    ),
    _over(
        "VllmTpotOverLimit",
        "chat",
        _latency(
            "request_time_per_output_token_seconds",
            {"0.15": "0+6x20 120+10x40", "0.2": "0+10x60"},
            "0+10x60",
        ),
        _latency("request_time_per_output_token_seconds", {"0.15": "0+10x60"}, "0+10x60"),
        "193.8ms",
    ),
    _over(
        "VllmDurationOverLimit",
        "answers",
        # As clients write whole numbers that are not Python's.
        _latency(
            "e2e_request_latency_seconds", {"10": "0+8x20 160+10x40", "15": "0+10x60"}, "0+10x60"
        ),
        _latency("e2e_request_latency_seconds", {"10.0": "0+9x60", "15.0": "0+10x60"}, "0+10x60"),
        "12.5s",
    ),
)

_TTFT = "vllm:time_to_first_token_seconds"
_BUCKETS = (
    Case(
        alert="VllmBucketMissing",
        # Buckets of its own, for a while.
        incident=histogram(_TTFT, VLLM, {"0.2": "0x5 0x20 stale"}, "0x5 0x20 stale"),
        # vLLM's, and no traffic.
        lookalike=histogram(_TTFT, VLLM, {"0.1": "0x60", "0.25": "0x60"}, "0x60"),
        minutes=(9, 15, 40),
        labels={**_ON_MODEL, **TICKET, "objective": "chat", "measure": "ttft"},
    ),
)

_STATE = (
    Case(
        alert="VllmDown",
        incident={_UP: "1x10 0x10 1x20", _RUNNING: "0x10 stale _x9 0x20"},
        lookalike={'up{job="node",instance="b:9100"}': "0x40"},
        minutes=(11, 14, 25),
        labels={**_ON_TARGET, **PAGE, "job": "vllm"},
    ),
    Case(
        alert="VllmMissing",
        incident={_UP: "1x10 stale", _RUNNING: "0x10 stale _x15 0x20"},
        # A router that stays while an engine of two goes.
        lookalike={'vllm:num_requests_running{job="r",instance="r:1",server="x"}': "1x10 stale"},
        minutes=(14, 20, 35),
        labels=PAGE,
    ),
    Case(
        alert="VllmSilent",
        incident={
            **_own(
                num_requests_waiting="3x40",
                iteration_tokens_total_count="0+500x10 5000x15 5000+500x20",
            ),
            _RUNNING: "4x40",
        },
        lookalike={
            **_own(num_requests_waiting="1x40", iteration_tokens_total_count="5000x40"),
            f'vllm:engine_sleep_state{{{VLLM},sleep_state="awake"}}': "0x40",
        },
        minutes=(9, 20, 35),
        labels={**_ON_MODEL, **PAGE, "engine": "0"},
        figures=("7",),
    ),
    Case(
        alert="VllmRestarted",
        incident=_own(generation_tokens_total="0+100x10 0+100x40"),
        # A gap in the scrapes.
        lookalike=_own(generation_tokens_total="0+100x10 _x3 1400+100x40"),
        minutes=(10, 15, 40),
        labels={**_ON_MODEL, **TICKET},
        figures=("1",),
    ),
    Case(
        alert="VllmDown",
        # Whoever was paged knows that it starts anew.
        incident={
            _UP: "1x10 0x10 1x20",
            _RUNNING: "0x10 stale _x9 0x20",
            **_own(generation_tokens_total="0+100x10 stale _x9 0+100x40"),
        },
        lookalike=_own(generation_tokens_total="0+100x40"),
        minutes=(11, 14, 25),
        labels={**_ON_TARGET, **PAGE, "job": "vllm"},
    ),
    Case(
        alert="VllmAnswersErrors",
        incident={
            f'http_requests_total{{{ON_VLLM},status="5xx"}}': "0+10x20 200x40",
            f'http_requests_total{{{ON_VLLM},status="2xx"}}': "0+90x60",
        },
        # Another program's errors, under a name that many use, and few of its own.
        lookalike={
            f'http_requests_total{{{ON_VLLM},status="5xx"}}': "0+4x60",
            f'http_requests_total{{{ON_VLLM},status="2xx"}}': "0+96x60",
            'http_requests_total{job="web",instance="w:80",status="5xx"}': "0+10x60",
            'http_requests_total{job="web",instance="w:80",status="2xx"}': "0+90x60",
        },
        minutes=(1, 15, 40),
        labels={**_ON_TARGET, **PAGE, "job": "vllm"},
        figures=("10%",),
    ),
    Case(
        alert="VllmQueueDeep",
        incident=_own(num_requests_waiting="0x5 24x15 4x20"),
        # A router's figure under the engine's name.
        lookalike={f'vllm:num_requests_waiting{{{ON_VLLM},server="x"}}': "90x40"},
        minutes=(8, 15, 25),
        labels={**_ON_MODEL, **TICKET},
        figures=("24",),
    ),
    Case(
        alert="VllmKvCacheSaturated",
        # Releases that publish the fact under two names.
        incident=_own(
            kv_cache_usage_perc="0.5x5 0.99x20 0.7x20",
            gpu_cache_usage_perc="0.5x5 0.99x20 0.7x20",
            num_requests_waiting="0x60",
            num_preemptions_total="0x5 0+2x20 40x20",
        ),
        lookalike={
            **_own(
                kv_cache_usage_perc="0.99x60",
                num_requests_waiting="0x60",
                num_preemptions_total="7x60",
            ),
            **renamed(
                _own(kv_cache_usage_perc="0.9x60", num_requests_waiting="3x60"), "llama", "qwen"
            ),
        },
        minutes=(7, 20, 35),
        labels={**_ON_MODEL, **TICKET, "engine": "0"},
        figures=("99%",),
    ),
)

CASES = (*_LATENCIES, *_BUCKETS, *_STATE)
