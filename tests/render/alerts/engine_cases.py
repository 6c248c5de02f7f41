"""Cases of alerts on engines and on how their requests end."""

from tests.render.alerts.cases import AGENT, ENGINE, MODEL, ON_ENGINE, ON_MODEL, Case, Series

PAGE = {"severity": "page"}
TICKET = {"severity": "ticket"}


def _events(kind: str, values: str) -> Series:
    return {f'llm_engine_events_total{{{ENGINE},kind="{kind}"}}': values}


def _requests(**values: str) -> Series:
    return {
        f'llm_requests_total{{{MODEL},status="{status}"}}': text for status, text in values.items()
    }


def _facts(**values: str) -> Series:
    return {f"llm_engine_{name}{{{MODEL}}}": text for name, text in values.items()}


def _gone(fact: str) -> str:
    return f'llm_engine_fact_missing{{{MODEL},fact="{fact}"}}'


def _told(
    alert: str, kind: str, what: str, *, severity: dict[str, str] = PAGE, at: int = 12
) -> Case:
    return Case(
        alert=alert,
        incident=_events(kind, "0x10 1x40"),
        # An agent that starts anew counts from zero.
        lookalike=_events(kind, "3x10 0x40"),
        minutes=(at - 3, at, 30),
        labels={**ON_ENGINE, **severity},
        summary=f"Engine chat-0 {what}",
        description=f"Events of kind {kind} over 10m: about 1. Each is listed with its evidence at "
        "/api/v1/events of the agent a:9470.",
        filled=("engine",),
    )


def _lasting(alert: str, kind: str, what: str, **values: str) -> Case:
    """A fault that goes on for half an hour after its event, and whose end is a restart."""
    down = "llm_engine_up" in values
    facts = {f"{name}{{{ENGINE if down else MODEL}}}": text for name, text in values.items()}
    return Case(
        alert=alert,
        incident={**_events(kind, "0x10 1x80"), **_events("RESTART", "0x50 1x40"), **facts},
        # Away, and by no such event.
        lookalike={**_events(kind, "1x90"), f"llm_engine_up{{{ENGINE}}}": "1x34 0x1 1x40"},
        minutes=(9, 35, 55),
        labels={**ON_ENGINE, **PAGE},
        summary=f"Engine chat-0 {what}",
        description=f"Events of kind {kind} over 10m: about 1. Each is listed with its evidence at "
        "/api/v1/events of the agent a:9470.",
        filled=("engine",),
        # These are muted.
        also={"LlmEngineDown" if down else "LlmEngineSilent": 1},
    )


_EVENTS = (
    _told("LlmEngineDied", "ENGINE_DEAD", "died"),
    _told("LlmEngineHanging", "HANG", "has work and computes nothing"),
    _told("LlmCudaOutOfMemory", "CUDA_OOM", "ran out of GPU memory"),
    _told("LlmHostOutOfMemory", "HOST_OOM", "lost a process to the OOM killer"),
    # Later than what the GPU's own alerts tell.
    _told("LlmEngineGpuFault", "GPU_FAULT", "has a GPU that failed", at=14),
    _told(
        "LlmEngineSizingError",
        "SIZING_ERROR",
        "does not start: its settings ask for more memory than there is",
    ),
    _told("LlmEngineRestarted", "RESTART", "restarted", severity=TICKET),
    _lasting("LlmEngineDied", "ENGINE_DEAD", "died", llm_engine_up="1x10 0x40 1x40"),
    _lasting(
        "LlmEngineHanging",
        "HANG",
        "has work and computes nothing",
        llm_engine_requests_running="4x90",
        llm_engine_requests_waiting="0x90",
        llm_engine_steps_total="0+500x10 5000x39 5000+500x40",
    ),
)

_ROTATION = (
    Case(
        alert="LlmProxyEngineEjected",
        incident={f"llm_proxy_engine_in_rotation{{{ENGINE}}}": "1x10 0x20 1x40"},
        # Short ejections now and then.
        lookalike={f"llm_proxy_engine_in_rotation{{{ENGINE}}}": "1x10 0 0 1x5 0 1x60"},
        minutes=(11, 25, 40),
        labels={**ON_ENGINE, **TICKET},
        summary="The proxy sends engine chat-0 no new requests",
        description="Workers of the proxy sent it new requests for 0% of 5m. The reason is in the "
        "event ENGINE_EJECTED at /api/v1/events of the agent a:9470.",
        filled=("engine",),
    ),
    Case(
        alert="LlmProxyNoEngineLeft",
        incident={f"llm_proxy_requests_forced_total{{{AGENT}}}": "0x10 0+60x10 600x60"},
        lookalike={f"llm_proxy_requests_forced_total{{{AGENT}}}": "0x10 20x60"},
        minutes=(10, 18, 30),
        labels={"instance": "a:9470", **PAGE},
        summary="All engines of a model are out of the rotation of the proxy at a:9470",
        description="About 120 requests over 2m went to engines that fail, because no other "
        "engine serves their model.",
        filled=("instance",),
    ),
)

_INVALID = (
    "of the requests were answered as the client's own mistake over 15m; the alert begins above "
    "90 %. With the model 'unknown' they name a model that no engine serves, and are compared with "
    "all requests to the engine."
)

REQUESTS = (
    Case(
        alert="LlmRequestsFailing",
        incident=_requests(ok="0+90x60", error="0+10x20 200+0x40"),
        lookalike=_requests(ok="0+96x60", error="0+4x60"),
        minutes=(1, 15, 85),
        labels={**ON_MODEL, **PAGE},
        summary="Requests to llama on chat-0 fail",
        description="10% of the requests ended in an error over 5m; the alert begins above 5 %.",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmEngineAnswersErrors",
        incident={
            f'llm_engine_requests_failed_total{{{MODEL},reason="5xx"}}': "0+10x20 200+0x40",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0+90x60",
            **_requests(ok="0+90x60"),
        },
        lookalike={
            f'llm_engine_requests_failed_total{{{MODEL},reason="5xx"}}': "0x5 4x60",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0x60",
        },
        minutes=(1, 15, 40),
        labels={**ON_MODEL, **PAGE},
        summary="Engine chat-0 answers with errors",
        description="10% of the responses were errors by the engine's own count over 5m; the alert "
        "begins above 5 %.",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmRequestsTimingOut",
        incident=_requests(ok="0+95x60", timeout="0+5x20 100+0x40"),
        # Clients that leave are no time-outs.
        lookalike=_requests(ok="0+95x60", cancelled="0+50x60", timeout="0x60"),
        minutes=(1, 15, 85),
        labels={**ON_MODEL, **TICKET},
        summary="Requests to llama on chat-0 time out",
        description="5% of the requests timed out over 5m; the alert begins above 1 %.",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmRequestsThrottled",
        incident=_requests(ok="0+95x60", throttled="0+5x20 100+0x40"),
        lookalike=_requests(ok="0+9995x60", throttled="0+5x60"),
        minutes=(1, 15, 85),
        labels={**ON_MODEL, **TICKET},
        summary="Requests to llama on chat-0 are throttled",
        description="5% of the requests were rejected with 429 or 503 over 5m; the alert begins "
        "above 1 %.",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmAdmissionRejections",
        incident={
            f'llm_engine_admission_rejections_total{{{MODEL},reason="queue"}}': "0+25x20 500+0x40",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0+75x60",
            **_requests(ok="0+75x60"),
        },
        lookalike={
            f'llm_engine_admission_rejections_total{{{MODEL},reason="queue"}}': "700x10 0x50",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0+75x60",
            **_requests(ok="0+75x60"),
        },
        minutes=(1, 15, 40),
        labels={**ON_MODEL, **TICKET},
        summary="Engine chat-0 rejects requests",
        description="25% of the requests were rejected by the engine's admission limits over "
        "5m; the alert begins above 1 %.",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmRequestsInvalid",
        incident=_requests(ok="0+60x20 1200x40 1200+60x40", invalid="0+6x20 120+60x40 2520+6x40"),
        # Most requests of a client, a wrong name beside other traffic, and somebody who tries.
        lookalike={
            **_requests(ok="0+60x100", invalid="0+240x100"),
            f'llm_requests_total{{{ENGINE},model="unknown",status="invalid"}}': "0+3x100",
            f'llm_requests_total{{{ENGINE},model="qwen",status="invalid"}}': "0x36 6x60",
        },
        minutes=(46, 55, 75),
        labels={**ON_MODEL, **TICKET},
        summary="Nearly all requests to llama on chat-0 are invalid",
        description=f"100% {_INVALID}",
        filled=("engine", "model"),
    ),
    # The model was deployed under another name, and no client knows it.
    Case(
        alert="LlmRequestsInvalid",
        incident={
            **_requests(ok="0+60x20 1200x40 1200+60x40"),
            f'llm_requests_total{{{ENGINE},model="unknown",status="invalid"}}': (
                "0x20 0+60x40 2400x40"
            ),
        },
        lookalike={
            **_requests(ok="0+8x100"),
            f'llm_requests_total{{{ENGINE},model="unknown",status="invalid"}}': "0+60x100",
        },
        minutes=(46, 55, 75),
        labels={**ON_ENGINE, "model": "unknown", **TICKET},
        summary="Nearly all requests to unknown on chat-0 are invalid",
        description=f"100% {_INVALID}",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmRequestsNotSeen",
        incident={
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0+2x60",
            **_requests(ok="0x30 0+2x30"),
        },
        # An engine that serves nobody hides nothing.
        lookalike={
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "70x60",
            **_requests(ok="0x60"),
        },
        minutes=(3, 20, 40),
        labels={**ON_ENGINE, **TICKET},
        summary="The agent sees no request of engine chat-0, which serves some",
        description="The engine finished about 30 requests over 15m, and the agent received none: "
        "no objective is judged on this engine.",
        filled=("engine",),
    ),
)

_STATE = (
    Case(
        alert="LlmEngineDown",
        incident={
            # A scrape of the agent that fails in between ends nothing.
            f"llm_engine_up{{{ENGINE}}}": "1x10 0x4 stale 0x3 1x20",
            f'llm_agent_scrapes_total{{{ENGINE},outcome="ok"}}': "0+12x10 120x10 120+12x20",
            f'llm_agent_scrapes_total{{{ENGINE},outcome="refused"}}': "0x10 0+12x10 120x20",
        },
        # Gone for as long as a quick restart takes.
        lookalike={f"llm_engine_up{{{ENGINE}}}": "1x10 0x2 1x30"},
        minutes=(11, 17, 25),
        labels={**ON_ENGINE, **PAGE},
        summary="Engine chat-0 does not answer",
        description="Every scrape by the agent failed for 2m. Most often: refused, 60 times in 5m.",
        filled=("engine",),
    ),
    Case(
        alert="LlmEngineNeverUp",
        incident={f"llm_engine_up{{{ENGINE}}}": "0x40 1x20"},
        # A large model that loads for the first time.
        lookalike={f"llm_engine_up{{{ENGINE}}}": "0x25 1x40"},
        minutes=(29, 35, 45),
        labels={**ON_ENGINE, **TICKET},
        summary="Engine chat-0 has not answered yet",
        description="Every scrape by the agent failed for 30m, and for 1d before.",
        filled=("engine",),
    ),
    Case(
        alert="LlmEngineRestartLoop",
        incident=_events("RESTART", "0x2 1x5 2x5 3x5 4x60"),
        lookalike=_events("RESTART", "0x80"),
        minutes=(1, 20, 60),
        labels={**ON_ENGINE, **PAGE},
        summary="Engine chat-0 restarts again and again",
        description="About 3 restarts over 30m.",
        filled=("engine",),
        also={"LlmEngineRestarted": 1},
    ),
    Case(
        alert="LlmEngineSilent",
        incident=_facts(
            requests_running="4x40",
            requests_waiting="3x40",
            steps_total="0+500x10 5000x15 5000+500x20",
            awake="1x40",
        ),
        # Asleep, with a request that waits for it to wake.
        lookalike=_facts(
            requests_running="0x40",
            requests_waiting="1x40",
            steps_total="5000x40",
            awake="0x40",
        ),
        minutes=(9, 20, 35),
        labels={**ON_ENGINE, **PAGE},
        summary="Engine chat-0 has requests and gives no output",
        description="7 requests run or wait, and for 5m no step of the engine gave output over 2m.",
        filled=("engine",),
    ),
    Case(
        alert="LlmQueueDeep",
        incident=_facts(requests_waiting="0x5 24x15 4x20"),
        lookalike=_facts(requests_waiting="10x40"),
        minutes=(8, 15, 25),
        labels={**ON_MODEL, **TICKET},
        summary="Requests to llama queue up on chat-0",
        description="24 requests wait for a place in the batch. If there are always more than 10, "
        "add a replica.",
        dashboard="goodput-capacity",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmKvCacheSaturated",
        incident=_facts(
            kv_cache_usage_ratio="0.5x5 0.99x20 0.7x20",
            requests_waiting="0x60",
            preemptions_total="0x5 0+2x20 40x20",
        ),
        # A full cache is what a busy engine has.
        lookalike=_facts(
            kv_cache_usage_ratio="0.99x60", requests_waiting="0x60", preemptions_total="7x60"
        ),
        minutes=(7, 20, 35),
        labels={**ON_MODEL, **TICKET},
        summary="The KV cache of chat-0 is too small for its load",
        description="99% of the KV cache is held by live requests, while others wait for it or "
        "start over. They get slower; no request is lost and no memory runs out.",
        dashboard="goodput-capacity",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmPrefixCacheCollapsed",
        incident=_facts(
            prefix_cache_query_tokens_total="0+1000x300",
            prefix_cache_hit_tokens_total="0+600x100 60000+100x100 70000+600x100",
        ),
        # A workload that never shared a prefix.
        lookalike=_facts(
            prefix_cache_query_tokens_total="0+1000x300",
            prefix_cache_hit_tokens_total="0+60x100 6000+10x200",
        ),
        minutes=(105, 145, 260),
        labels={**ON_MODEL, **TICKET},
        summary="The prefix cache of chat-0 serves far less than it did",
        description="10% of the tokens looked up over 30m were found, less than half of what is "
        "usual over 1d.",
        dashboard="goodput-capacity",
        filled=("engine", "model"),
    ),
    Case(
        alert="LlmEngineFactMissing",
        incident={
            _gone("llm_engine_requests_waiting"): "_x10 1x30 _x30",
            _gone("llm_engine_kv_cache_usage_ratio"): "_x12 1x28 _x30",
        },
        # An engine in the middle of its restart.
        lookalike={_gone("llm_engine_requests_waiting"): "_x10 1x8 _x50"},
        minutes=(19, 30, 50),
        labels={**ON_ENGINE, **TICKET},
        summary="Engine chat-0 lacks facts that it gave before",
        description="2 facts are gone, and no alert on them can fire: "
        "llm_engine_kv_cache_usage_ratio llm_engine_requests_waiting ",
        filled=("engine",),
    ),
)

ENGINES = (*_EVENTS, *_ROTATION, *_STATE)
