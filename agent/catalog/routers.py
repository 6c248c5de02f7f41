"""Routers in front of engines: the facts of them, and each router's series for these.

Each fact is published with the label `router` before its own. Several agents may read one router,
so MAX merges them; the series of its models and priorities are summed. Names: llm-d's endpoint
picker `pkg/epp/metrics/llm_d_router_metrics.go` of llm-d/llm-d-router, and before its 0.9
`pkg/epp/metrics/metrics.go` of gateway-api-inference-extension, which newer ones publish too, with
the outcomes of `pkg/epp/flowcontrol/types/outcomes.go`; Dynamo's frontend
`lib/runtime/src/metrics/prometheus_names.rs`; production-stack
`src/vllm_router/services/metrics_service/__init__.py`.
"""

from functools import partial

from agent.catalog.engines.dialect import Dialect, Spelling
from agent.catalog.metric import Merge, Metric, counter, gauge

_gauge = partial(gauge, merge=Merge.MAX)
_counter = partial(counter, merge=Merge.MAX)

ROUTER_UP = _gauge(
    "llm_router_up",
    "1 when the router's metrics were read at the last try, 0 when they could not be read.",
    absent="until the first try",
)
ROUTER_WAITING = _gauge(
    "llm_router_requests_waiting", "Requests that the router holds in its own queue now."
)
ROUTER_RUNNING = _gauge(
    "llm_router_requests_running", "Requests that the router sent on and that have not ended."
)
ROUTER_ENDPOINTS = _gauge(
    "llm_router_endpoints_ready", "Engines that the router holds for ready or healthy."
)
ROUTER_REQUESTS = _counter("llm_router_requests", "Requests that the router counted.")
ROUTER_ERRORS = _counter(
    "llm_router_errors",
    "Requests that ended in an error, by the router's own reason; mistakes of clients included.",
    "reason",
)
ROUTER_REJECTIONS = _counter(
    "llm_router_rejections",
    "Requests that the router refused or dropped from its queue, by its own reason.",
    "reason",
)

ROUTER_FACTS = tuple(fact for fact in list(globals().values()) if isinstance(fact, Metric))

_spelling = partial(Spelling, merge=Merge.SUM)
_NOT_SENT = tuple(
    f"{what}{why}"
    for what, reasons in (
        ("Rejected", ("Capacity", "NoEndpoints", "Other")),
        ("Evicted", ("TTL", "NoEndpoints", "ContextCancelled", "Other")),
    )
    for why in reasons
)
_of_outcome = partial(_spelling, labels={"reason": "outcome"}, only={"outcome": _NOT_SENT})
_of_code = partial(_spelling, labels={"reason": "error_code"})
_of_type = partial(_spelling, labels={"reason": "error_type"})

ROUTERS = (
    Dialect(
        engine="llm-d's endpoint picker (EPP)",
        prefixes=("llm_d_epp_",),
        facts={
            ROUTER_WAITING: (
                _spelling("llm_d_epp_flow_control_queue_size"),
                _spelling("inference_extension_flow_control_queue_size"),
            ),
            ROUTER_RUNNING: (
                _spelling("llm_d_epp_request_running"),
                _spelling("inference_objective_running_requests"),
            ),
            ROUTER_ENDPOINTS: (
                _spelling("llm_d_epp_ready_endpoints"),
                _spelling("inference_pool_ready_pods"),
            ),
            ROUTER_REQUESTS: (
                _spelling("llm_d_epp_request_total"),
                _spelling("inference_objective_request_total"),
            ),
            ROUTER_ERRORS: (
                _of_code("llm_d_epp_request_error_total"),
                _of_code("inference_objective_request_error_total"),
            ),
            ROUTER_REJECTIONS: (
                _of_outcome("llm_d_epp_flow_control_request_queue_duration_seconds_count"),
                _of_outcome(
                    "inference_extension_flow_control_request_queue_duration_seconds_count"
                ),
            ),
        },
    ),
    Dialect(
        engine="Dynamo's frontend",
        prefixes=("dynamo_frontend_", "nv_llm_http_service_"),
        facts={
            # `dynamo_frontend_queued_requests` are those without a first token, in engines, too.
            ROUTER_WAITING: (_spelling("dynamo_frontend_router_queue_pending_requests"),),
            ROUTER_RUNNING: (_spelling("dynamo_frontend_inflight_requests"),),
            ROUTER_REQUESTS: (_spelling("dynamo_frontend_requests_total"),),
            ROUTER_ERRORS: (
                _of_type("dynamo_frontend_requests_total", only={"status": ("error",)}),
            ),
            ROUTER_REJECTIONS: (
                _of_type("dynamo_frontend_requests_total", only={"error_type": ("overload",)}),
            ),
        },
    ),
    Dialect(
        engine="production-stack's router",
        prefixes=("vllm:",),
        facts={
            ROUTER_RUNNING: (
                _spelling("vllm:num_prefill_requests", also=("vllm:num_decoding_requests",)),
            ),
            ROUTER_ENDPOINTS: (_spelling("vllm:healthy_pods_total"),),
            ROUTER_REQUESTS: (_spelling("vllm:num_incoming_requests_total"),),
            ROUTER_ERRORS: (_of_type("vllm:request_errors_total"),),
        },
    ),
)
