"""The parts of one request's time that its row does not have, so that all of them add up."""

from typing import NamedTuple

LATENCIES = ("ttft_s", "e2e_s", "queue_s", "prefill_s", "decode_s")


class RequestParts(NamedTuple):
    """`queue_s`, `prefill_s`, `decode_s`, `front_s` and `rest_s` add up to the whole request.

    `front_s` is the time before the first token outside of the engine's scheduler: the engine's
    frontend and, seen at the proxy, the way there and back. `rest_s` is what is left over: after
    the last token, and what the clocks and views of one request differ by, so it may be negative.
    """

    front_s: float | None
    rest_s: float | None


def request_parts(
    *,
    ttft_s: float | None,
    e2e_s: float | None,
    queue_s: float | None,
    prefill_s: float | None,
    decode_s: float | None,
) -> RequestParts:
    """The missing parts; a part that needs an unknown latency is None."""
    if ttft_s is None or queue_s is None or prefill_s is None:
        return RequestParts(None, None)
    front_s = ttft_s - queue_s - prefill_s
    if e2e_s is None or decode_s is None:
        return RequestParts(front_s, None)
    return RequestParts(front_s, e2e_s - ttft_s - decode_s)
