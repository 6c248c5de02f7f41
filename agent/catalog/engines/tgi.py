"""Text Generation Inference 3.3. Names: its docs/source/reference/metrics.md and router/src."""

from agent.catalog import engine_facts as fact
from agent.catalog.engines.dialect import OFTEN_ABSENT, PROCESS_FACTS, Dialect, Spelling

# The others are mistakes of clients (validation, template: 422) and clients that left (dropped).
_FAILURES = {"err": ("generation", "incomplete")}
# 429: as many requests as its limit are in flight.
_REJECTIONS = {"err": ("overloaded",)}

TGI = Dialect(
    engine="tgi",
    prefixes=("tgi_",),
    model_path="/info",
    # The length of a prompt is counted when it is validated (router/src/validation.rs).
    counted_at_end=frozenset({fact.OUTPUT_TOKENS}),
    occasional=OFTEN_ABSENT,
    facts={
        fact.REQUESTS_RUNNING: (Spelling("tgi_batch_current_size"),),
        fact.REQUESTS_WAITING: (Spelling("tgi_queue_size"),),
        fact.INPUT_TOKENS: (Spelling("tgi_request_input_length_sum"),),
        fact.OUTPUT_TOKENS: (Spelling("tgi_request_generated_tokens_sum"),),
        # Its counters have no `_total`.
        fact.REQUESTS_FINISHED: (Spelling("tgi_request_success"),),
        fact.REQUESTS_FAILED: (
            Spelling("tgi_request_failure", labels={"reason": "err"}, only=_FAILURES),
        ),
        fact.ADMISSION_REJECTIONS: (
            Spelling("tgi_request_failure", labels={"reason": "err"}, only=_REJECTIONS),
        ),
        # Its only time per token; it includes the prefill, so it is an upper bound.
        fact.TIME_PER_OUTPUT_TOKEN: (Spelling("tgi_request_mean_time_per_token_duration"),),
        fact.REQUEST_DURATION: (Spelling("tgi_request_duration"),),
        fact.QUEUE_TIME: (Spelling("tgi_request_queue_duration"),),
        **PROCESS_FACTS,
    },
)
