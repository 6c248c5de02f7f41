"""What a request adds to the latencies by OpenTelemetry's conventions for GenAI."""

from collections.abc import Iterator

from agent.catalog import genai
from agent.catalog.metric import Metric
from agent.records.request import EngineView, RequestRecord, Status, Vantage

# The metric, error.type (empty: none), and seconds.
Measured = tuple[Metric, str, float | None]


def error_type(record: RequestRecord) -> str | None:
    """The status code of a response 5xx, else a short code; None without an error of the server.

    By the conventions a response 3xx or 4xx is not an error of the server, and a client that leaves
    is one: it did not get the response whole.
    """
    code = record.http_status
    if code is not None and code >= 300:
        return str(code) if code >= 500 else None
    # An error inside a stream that blames the request is not an error of the server either.
    if record.status in (Status.OK, Status.INVALID):
        return None
    return (record.proxied and record.proxied.error) or record.status.value


def latencies_by_convention(record: RequestRecord) -> Iterator[Measured]:
    """The engine's view as a server's latencies, and the user's as a client's."""
    if record.vantage is Vantage.ENGINE:
        own = EngineView(ttft_s=record.ttft_s, tpot_s=record.tpot_s, e2e_s=record.e2e_s)
        yield from _of_server(own, error_type(record) or "")
        return
    yield from _of_client(record)
    if record.vantage is Vantage.JOINED and record.engine_view is not None:
        status = record.engine_view.status
        failed = status not in (None, Status.OK)
        yield from _of_server(record.engine_view, status.value if failed and status else "")


def _of_server(view: EngineView, error: str) -> Iterator[Measured]:
    yield genai.SERVER_DURATION, error, view.e2e_s
    if not error:
        yield genai.SERVER_TTFT, "", view.ttft_s
        yield genai.SERVER_TPOT, "", view.tpot_s


def _of_client(record: RequestRecord) -> Iterator[Measured]:
    """A response 4xx is an error of the client's request."""
    code = record.http_status
    is_mistake = code is not None and 400 <= code < 500
    error = str(code) if is_mistake else error_type(record) or ""
    yield genai.CLIENT_DURATION, error, record.e2e_s
    if record.proxied is not None and record.proxied.streamed:
        yield genai.CLIENT_TTFC, error, record.ttft_s
