"""llama.cpp's server with `--metrics`. Names: tools/server/server-task.cpp of build 11434.

Its counters have six digits: above a million they move in steps of 10, above 10 million of 100.
"""

from agent.catalog import engine_facts as fact
from agent.catalog.engines.dialect import OFTEN_ABSENT, PROCESS_FACTS, Dialect, Spelling

_COMPUTED, _CACHED = "llamacpp:prompt_tokens_total", "llamacpp:prompt_tokens_cached_total"
_GENERATED = "llamacpp:tokens_predicted_total"

LLAMACPP = Dialect(
    engine="llamacpp",
    prefixes=("llamacpp:",),
    # Prompt tokens are counted as they are computed (tools/server/server-context.cpp).
    counted_at_end=frozenset({fact.OUTPUT_TOKENS}),
    # Older builds do not count what they found in the cache.
    occasional=OFTEN_ABSENT | {fact.CACHED_INPUT_TOKENS},
    facts={
        fact.REQUESTS_RUNNING: (Spelling("llamacpp:requests_processing"),),
        fact.REQUESTS_WAITING: (Spelling("llamacpp:requests_deferred"),),
        fact.INPUT_TOKENS: (Spelling(_COMPUTED, also=(_CACHED,)),),
        fact.CACHED_INPUT_TOKENS: (Spelling(_CACHED),),
        fact.OUTPUT_TOKENS: (Spelling(_GENERATED),),
        # Each call of llama_decode(), also for a piece of a prompt.
        fact.STEPS: (Spelling("llamacpp:n_decode_total"),),
        fact.STEP_TOKENS: (Spelling(_COMPUTED, also=(_GENERATED,)),),
        # Zero if the server has no draft model.
        fact.SPEC_DECODE_DRAFTS: (
            Spelling("llamacpp:spec_decode_num_drafts_total", zero_means_off=True),
        ),
        fact.SPEC_DECODE_DRAFT_TOKENS: (
            Spelling("llamacpp:spec_decode_num_draft_tokens_total", zero_means_off=True),
        ),
        fact.SPEC_DECODE_ACCEPTED_TOKENS: (
            Spelling("llamacpp:spec_decode_num_accepted_tokens_total", zero_means_off=True),
        ),
        fact.SPEC_DECODE_ACCEPTED_BY_POSITION: (
            Spelling("llamacpp:spec_decode_num_accepted_tokens_per_pos_total"),
        ),
        **PROCESS_FACTS,
    },
)
