"""What is left of counts when some count no more."""

from hypothesis import given
from hypothesis import strategies as st

from agent.analysis.difference import difference
from agent.analysis.tally import tally_of, total
from agent.records.objective import JudgedRequest, Match
from agent.records.request import Status, Vantage
from tests.records.making import judged, objective, record

OBJECTIVES = (
    objective("fast", ttft_s=0.05),
    objective("fair", ttft_s=0.5, match=Match(model="llama*")),
)
seconds = st.none() | st.floats(0, 1e6)
tokens = st.none() | st.integers(0, 1000)
requests = st.lists(
    st.builds(
        record,
        status=st.sampled_from(Status),
        vantage=st.sampled_from(Vantage),
        model=st.sampled_from(["llama", "qwen"]),
        ttft_s=seconds,
        tpot_s=seconds,
        queue_s=seconds,
        input_tokens=tokens,
        output_tokens=tokens,
    ),
    max_size=8,
).map(lambda all_of: judged(all_of, OBJECTIVES))


@given(requests, requests)
def test_what_is_left_is_the_count_of_the_others_alone(
    kept: list[JudgedRequest], gone: list[JudgedRequest]
) -> None:
    whole = total([tally_of(gone), tally_of(kept)])
    assert difference(whole, tally_of(gone)) == tally_of(kept)


@given(requests, requests)
def test_neither_count_is_changed(kept: list[JudgedRequest], gone: list[JudgedRequest]) -> None:
    whole, part = tally_of([*kept, *gone]), tally_of(gone)
    difference(whole, part)
    assert (whole, part) == (tally_of([*kept, *gone]), tally_of(gone))
