"""The response to a sender for each failure: opentelemetry-proto docs/specification.md."""

from dataclasses import dataclass

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from agent.catalog.reasons import ExportRefused
from agent.errors import AgentError, PayloadInvalid, PayloadTooLarge, StoreUnavailable
from agent.settings.access import AccessRefusal
from agent.sources.otlp.limits import BodyTooSlow, NoRoom
from agent.sources.otlp.receiver import ExportResult


@dataclass(frozen=True, slots=True)
class Refusal:
    """One failure: its reason for counting, HTTP status, gRPC code, and whether to send again."""

    reason: ExportRefused
    http_status: int
    grpc_code: int
    retryable: bool = False


# google.rpc.Code
INVALID_ARGUMENT = 3
NOT_FOUND = 5
PERMISSION_DENIED = 7
RESOURCE_EXHAUSTED = 8
UNAVAILABLE = 14
UNAUTHENTICATED = 16

INVALID = Refusal(ExportRefused.INVALID, 400, INVALID_ARGUMENT)
NO_SUCH_PATH = Refusal(ExportRefused.NO_SUCH_PATH, 404, NOT_FOUND)
METHOD = Refusal(ExportRefused.METHOD, 405, INVALID_ARGUMENT)
TOO_LARGE = Refusal(ExportRefused.TOO_LARGE, 413, RESOURCE_EXHAUSTED)
CONTENT_TYPE = Refusal(ExportRefused.CONTENT_TYPE, 415, INVALID_ARGUMENT)
CONTENT_ENCODING = Refusal(ExportRefused.CONTENT_ENCODING, 415, INVALID_ARGUMENT)
BUSY = Refusal(ExportRefused.BUSY, 503, UNAVAILABLE, retryable=True)
# A sender tries again after RESOURCE_EXHAUSTED only with a delay, and Python's exporter over HTTP
# after 503, but not after 429.
NO_ROOM = Refusal(ExportRefused.NO_ROOM, 503, RESOURCE_EXHAUSTED, retryable=True)
TOO_SLOW = Refusal(ExportRefused.TOO_SLOW, 503, UNAVAILABLE, retryable=True)


AT_THE_DOOR = {
    AccessRefusal.TOKEN: Refusal(ExportRefused.TOKEN, 401, UNAUTHENTICATED),
    AccessRefusal.HOST: Refusal(ExportRefused.HOST, 421, PERMISSION_DENIED),
}

REFUSALS: dict[type[Exception], Refusal] = {
    PayloadInvalid: INVALID,
    PayloadTooLarge: TOO_LARGE,
    StoreUnavailable: BUSY,
    NoRoom: NO_ROOM,
    BodyTooSlow: TOO_SLOW,
}
REFUSED = tuple(REFUSALS)


def public(error: Exception) -> str:
    """What the sender may read of an error of REFUSED."""
    return error.public if isinstance(error, AgentError) else str(error)


def response(result: ExportResult) -> ExportTraceServiceResponse:
    """The message for a full or partial success; partial_success is unset on a full one."""
    message = ExportTraceServiceResponse()
    if result.rejected_spans:
        message.partial_success.rejected_spans = result.rejected_spans
        message.partial_success.error_message = result.message
    return message
