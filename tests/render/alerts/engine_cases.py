"""Cases of alerts on engines and on how their requests end."""

from tests.render.alerts.cases import AGENT, ENGINE, MODEL, ON_ENGINE, ON_MODEL, Case, Series

OTHER_MODEL = f'{ENGINE},model="qwen"'
PAGE = {"severity": "critical"}
TICKET = {"severity": "warning"}


def _events(kind: str, values: str) -> Series:
    return {f'llm_engine_events_total{{{ENGINE},kind="{kind}"}}': values}


def _requests(**values: str) -> Series:
    return {
        f'llm_requests_total{{{MODEL},status="{status}"}}': text for status, text in values.items()
    }


def _facts(**values: str) -> Series:
    return {f"llm_engine_{name}{{{MODEL}}}": text for name, text in values.items()}


def _pools(*, prefill: str, decode: str, deferred: str) -> Series:
    """The queues of a prefill engine, and of a decode engine where some wait for KV values."""
    first, second = (MODEL.replace("chat-0", name) for name in ("prefill-0", "decode-0"))
    waiting, role = "llm_engine_requests_waiting_by_reason", "llm_engine_role"
    return {
        f'{role}{{{ENGINE.replace("chat-0", "prefill-0")},role="prefill"}}': "1x70",
        f'{role}{{{ENGINE.replace("chat-0", "decode-0")},role="decode"}}': "1x70",
        f"llm_engine_requests_waiting{{{first}}}": prefill,
        f'{waiting}{{{second},reason="capacity"}}': decode,
        f'{waiting}{{{second},reason="deferred"}}': deferred,
        f"llm_engine_requests_waiting{{{second}}}": deferred,
    }


def _gone(fact: str) -> str:
    return f'llm_engine_fact_missing{{{MODEL},fact="{fact}"}}'


def _told(alert: str, kind: str, *, severity: dict[str, str] = PAGE, at: int = 12) -> Case:
    return Case(
        alert=alert,
        incident=_events(kind, "0x10 1x40"),
        # An agent that starts anew counts from zero.
        lookalike=_events(kind, "3x10 0x40"),
        minutes=(at - 3, at, 30),
        labels={**ON_ENGINE, **severity},
        figures=("1",),
    )


def _lasting(alert: str, kind: str, **values: str) -> Case:
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
        figures=("1",),
        # These are muted.
        also={"LlmEngineDown" if down else "LlmEngineSilent": 1},
    )


_EVENTS = (
    _told("LlmEngineDied", "ENGINE_DEAD"),
    _told("LlmEngineHanging", "HANG"),
    _told("LlmCudaOutOfMemory", "CUDA_OOM"),
    _told("LlmHostOutOfMemory", "HOST_OOM"),
    # Later than what the GPU's own alerts tell.
    _told("LlmEngineGpuFault", "GPU_FAULT", at=14),
    _told("LlmEngineSizingError", "SIZING_ERROR"),
    _told("LlmEngineRestarted", "RESTART", severity=TICKET),
    _lasting("LlmEngineDied", "ENGINE_DEAD", llm_engine_up="1x10 0x40 1x40"),
    _lasting(
        "LlmEngineHanging",
        "HANG",
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
        figures=("0%",),
    ),
    Case(
        alert="LlmProxyNoEngineLeft",
        incident={f"llm_proxy_requests_forced_total{{{AGENT}}}": "0x10 0+60x10 600x60"},
        lookalike={f"llm_proxy_requests_forced_total{{{AGENT}}}": "0x10 20x60"},
        minutes=(10, 18, 30),
        labels={"instance": "a:9470", **PAGE},
        figures=("120",),
    ),
)

REQUESTS = (
    Case(
        alert="LlmRequestsFailing",
        incident=_requests(ok="0+90x60", error="0+10x20 200+0x40"),
        lookalike=_requests(ok="0+96x60", error="0+4x60"),
        minutes=(1, 15, 85),
        labels={**ON_MODEL, **PAGE},
        figures=("10%",),
    ),
    Case(
        alert="LlmEngineAnswersErrors",
        incident={
            f'llm_engine_requests_failed_total{{{MODEL},reason="5xx"}}': "0+10x20 200+0x40",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0+90x60",
            **_requests(ok="0+90x60"),
        },
        # Few errors of few requests, and few of many.
        lookalike={
            f'llm_engine_requests_failed_total{{{MODEL},reason="5xx"}}': "0x5 4x60",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0x60",
            f'llm_engine_requests_failed_total{{{OTHER_MODEL},reason="5xx"}}': "0+4x60",
            f'llm_engine_requests_finished_total{{{OTHER_MODEL},finish_reason="stop"}}': "0+96x60",
            **_requests(ok="0+96x60"),
        },
        minutes=(1, 15, 40),
        labels={**ON_MODEL, **PAGE},
        figures=("10%",),
    ),
    Case(
        alert="LlmRequestsTimingOut",
        incident=_requests(ok="0+95x60", timeout="0+5x20 100+0x40"),
        # Clients that leave are no time-outs.
        lookalike=_requests(ok="0+95x60", cancelled="0+50x60", timeout="0x60"),
        minutes=(1, 15, 85),
        labels={**ON_MODEL, **TICKET},
        figures=("5%",),
    ),
    Case(
        alert="LlmRequestsThrottled",
        incident=_requests(ok="0+95x60", throttled="0+5x20 100+0x40"),
        lookalike=_requests(ok="0+9995x60", throttled="0+5x60"),
        minutes=(1, 15, 85),
        labels={**ON_MODEL, **TICKET},
        figures=("5%",),
    ),
    Case(
        alert="LlmAdmissionRejections",
        incident={
            f'llm_engine_admission_rejections_total{{{MODEL},reason="queue"}}': "0+25x20 500+0x40",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0+75x60",
            **_requests(ok="0+75x60"),
        },
        lookalike={
            # An engine that starts anew, and hardly rejects any.
            f'llm_engine_admission_rejections_total{{{MODEL},reason="queue"}}': "700x10 0+0.5x50",
            f'llm_engine_requests_finished_total{{{MODEL},finish_reason="stop"}}': "0+75x60",
            **_requests(ok="0+75x60"),
        },
        minutes=(1, 15, 40),
        labels={**ON_MODEL, **TICKET},
        figures=("25%",),
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
        figures=("100%",),
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
        figures=("100%",),
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
        figures=("30",),
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
        figures=(" Most often: refused, 60 times in 5m.",),
    ),
    Case(
        alert="LlmEngineNeverUp",
        incident={f"llm_engine_up{{{ENGINE}}}": "0x40 1x20"},
        # A large model that loads for the first time.
        lookalike={f"llm_engine_up{{{ENGINE}}}": "0x25 1x40"},
        minutes=(29, 35, 45),
        labels={**ON_ENGINE, **TICKET},
    ),
    Case(
        alert="LlmEngineRestartLoop",
        incident=_events("RESTART", "0x2 1x5 2x5 3x5 4x60"),
        lookalike=_events("RESTART", "0x80"),
        minutes=(1, 20, 60),
        labels={**ON_ENGINE, **PAGE},
        figures=("3",),
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
        figures=("7",),
    ),
    Case(
        alert="LlmQueueDeep",
        incident=_facts(requests_waiting="0x5 24x15 4x20"),
        lookalike=_facts(requests_waiting="10x40"),
        minutes=(8, 15, 25),
        labels={**ON_MODEL, **TICKET},
        figures=("24",),
    ),
    Case(
        alert="LlmTooFewReplicas",
        incident={f'llm_slo_replicas_needed{{{MODEL},objective="chat"}}': "0.7x5 1.4x30 0.7x30"},
        # One replica gets more than it holds, and the others have room.
        lookalike={
            f'llm_slo_replicas_needed{{{MODEL},objective="chat"}}': "1.2x60",
            f'llm_slo_replicas_needed{{{MODEL.replace("chat-0", "chat-1")},objective="chat"}}': (
                "0.6x60"
            ),
        },
        minutes=(18, 25, 45),
        labels={"objective": "chat", "model": "llama", **TICKET},
        figures=("1.4",),
    ),
    Case(
        alert="LlmRanksUneven",
        incident={
            f'llm_engine_rank_skew_ratio{{{MODEL},measure="requests"}}': "1.1x5 1.9x25 1.1x20",
            **_facts(requests_running="24x50", requests_waiting="6x50", data_parallel_ranks="4x50"),
        },
        # Hardly any requests, all on one rank; and many whose step times alone differ.
        lookalike={
            f'llm_engine_rank_skew_ratio{{{MODEL},measure="requests"}}': "4x50",
            **_facts(requests_running="8x50", requests_waiting="0x50", data_parallel_ranks="4x50"),
            f'llm_engine_rank_skew_ratio{{{OTHER_MODEL},measure="step_time"}}': "4x50",
            f"llm_engine_requests_running{{{OTHER_MODEL}}}": "24x50",
            f"llm_engine_requests_waiting{{{OTHER_MODEL}}}": "6x50",
            f"llm_engine_data_parallel_ranks{{{OTHER_MODEL}}}": "4x50",
        },
        minutes=(12, 20, 40),
        labels={**ON_MODEL, **TICKET},
        figures=("1.9",),
    ),
    Case(
        alert="LlmPoolTooSmall",
        # The decode engine waits for KV values, not for capacity.
        incident=_pools(prefill="0x5 6x30 0x30", decode="0x70", deferred="9x70"),
        # Both are short: another engine of one pool would only move the queue.
        lookalike=_pools(prefill="6x70", decode="1.5x70", deferred="0x70"),
        minutes=(15, 28, 55),
        labels={"model": "llama", "role": "prefill", **TICKET},
        figures=("6",),
    ),
    Case(
        alert="LlmKvCacheSaturated",
        incident=_facts(
            kv_cache_usage_ratio="0.5x5 0.99x20 0.7x20",
            requests_waiting="0x60",
            preemptions_total="0x5 0+2x20 40x20",
        ),
        # A full cache is what a busy engine has, and a queue what one has without a full cache.
        lookalike={
            **_facts(
                kv_cache_usage_ratio="0.99x60", requests_waiting="0x60", preemptions_total="7x60"
            ),
            f"llm_engine_kv_cache_usage_ratio{{{OTHER_MODEL}}}": "0.9x60",
            f"llm_engine_requests_waiting{{{OTHER_MODEL}}}": "3x60",
            f"llm_engine_preemptions_total{{{OTHER_MODEL}}}": "0+1x60",
        },
        minutes=(7, 20, 35),
        labels={**ON_MODEL, **TICKET},
        figures=("99%",),
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
        figures=("10%",),
    ),
    Case(
        alert="LlmKvOffloadSlow",
        # 50 s of loading a minute for 10,000 tokens that take 10 s to compute; then half of that.
        incident=_facts(
            external_cache_hit_tokens_total="0+10000x160",
            kv_offload_load_seconds_total="0+1x20 20+40x60 2420+1x80",
            kv_offload_tier_read_seconds_total="0+1x20 20+10x60 620+1x80",
            prefill_time_seconds_sum="0+20x160",
            input_tokens_total="0+50000x160",
            cached_input_tokens_total="0+30000x160",
        ),
        # Slow, but hardly used; and a fast one.
        lookalike={
            **_facts(
                external_cache_hit_tokens_total="0+100x160",
                kv_offload_load_seconds_total="0+40x160",
                prefill_time_seconds_sum="0+20x160",
                input_tokens_total="0+50000x160",
                cached_input_tokens_total="0+30000x160",
            ),
            f"llm_engine_external_cache_hit_tokens_total{{{OTHER_MODEL}}}": "0+10000x160",
            f"llm_engine_kv_offload_load_seconds_total{{{OTHER_MODEL}}}": "0+9x160",
            f"llm_engine_prefill_time_seconds_sum{{{OTHER_MODEL}}}": "0+20x160",
            f"llm_engine_input_tokens_total{{{OTHER_MODEL}}}": "0+50000x160",
            f"llm_engine_cached_input_tokens_total{{{OTHER_MODEL}}}": "0+30000x160",
        },
        minutes=(24, 75, 140),
        labels={**ON_MODEL, **TICKET},
        figures=("5",),
    ),
    Case(
        alert="LlmDraftsRefused",
        incident=_facts(
            spec_decode_drafts_total="0+1000x160",
            spec_decode_accepted_tokens_total="0+1200x20 24000+50x60 27000+1200x80",
        ),
        # Few drafts, none accepted; and many of which a fifth is.
        lookalike={
            **_facts(
                spec_decode_drafts_total="0+10x160", spec_decode_accepted_tokens_total="0x160"
            ),
            f"llm_engine_spec_decode_drafts_total{{{OTHER_MODEL}}}": "0+1000x160",
            f"llm_engine_spec_decode_accepted_tokens_total{{{OTHER_MODEL}}}": "0+200x160",
        },
        minutes=(30, 75, 130),
        labels={**ON_MODEL, **TICKET},
        figures=("5%",),
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
        figures=("2", "llm_engine_kv_cache_usage_ratio llm_engine_requests_waiting "),
    ),
)

ENGINES = (*_EVENTS, *_ROTATION, *_STATE)
