"""How each failure is told to a sender: opentelemetry-proto docs/specification.md, "Failures"."""

from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agent.catalog.reasons import ExportRefused
from agent.errors import PayloadInvalid, PayloadTooLarge, StoreUnavailable
from agent.sources.otlp.receiver import ExportResult


@dataclass(frozen=True, slots=True)
class Refusal:
    """One failure: its word for counting, HTTP status, gRPC code, and whether to send again."""

    reason: ExportRefused
    http_status: int
    grpc_code: int
    retryable: bool = False


# google.rpc.Code
INVALID_ARGUMENT = 3
NOT_FOUND = 5
RESOURCE_EXHAUSTED = 8
UNAVAILABLE = 14

INVALID = Refusal(ExportRefused.INVALID, 400, INVALID_ARGUMENT)
NO_SUCH_PATH = Refusal(ExportRefused.NO_SUCH_PATH, 404, NOT_FOUND)
METHOD = Refusal(ExportRefused.METHOD, 405, INVALID_ARGUMENT)
TOO_LARGE = Refusal(ExportRefused.TOO_LARGE, 413, RESOURCE_EXHAUSTED)
CONTENT_TYPE = Refusal(ExportRefused.CONTENT_TYPE, 415, INVALID_ARGUMENT)
CONTENT_ENCODING = Refusal(ExportRefused.CONTENT_ENCODING, 415, INVALID_ARGUMENT)
BUSY = Refusal(ExportRefused.BUSY, 503, UNAVAILABLE, retryable=True)
TOO_SLOW = Refusal(ExportRefused.TOO_SLOW, 503, UNAVAILABLE, retryable=True)


class BodyTooSlow(Exception):
    """A sender took too long to send its body."""

    def __init__(self) -> None:
        super().__init__("the body took too long to come; send smaller batches")


REFUSALS: dict[type[Exception], Refusal] = {
    PayloadInvalid: INVALID,
    PayloadTooLarge: TOO_LARGE,
    StoreUnavailable: BUSY,
    BodyTooSlow: TOO_SLOW,
}
REFUSED = tuple(REFUSALS)


def response(answer: ExportResult) -> ExportTraceServiceResponse:
    """The message for a success, full or partial; partial_success is unset on full success."""
    message = ExportTraceServiceResponse()
    if answer.rejected_spans:
        message.partial_success.rejected_spans = answer.rejected_spans
        message.partial_success.error_message = answer.message
    return message
