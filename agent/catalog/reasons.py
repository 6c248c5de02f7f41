"""Reasons of failures: the values of the label `reason` of counters.

The sets are closed, so that each series exists at zero before its first increment, which
increase() does not count in a new series.
"""

from collections.abc import Iterator
from enum import StrEnum

from agent.catalog.spans import REQUEST_ATTRIBUTES, ValueType


class ExportRefused(StrEnum):
    """Why a whole OTLP body was refused."""

    INVALID = "invalid"
    NO_SUCH_PATH = "no_such_path"
    METHOD = "method"
    TOO_LARGE = "too_large"
    CONTENT_TYPE = "content_type"
    CONTENT_ENCODING = "content_encoding"
    BUSY = "busy"
    NO_ROOM = "no_room"
    TOO_SLOW = "too_slow"
    CLIENT_GONE = "client_gone"
    TOKEN = "token"
    HOST = "host"


class SpanRejected(StrEnum):
    """Why a span was rejected."""

    ID_LENGTH = "id_length"
    ID_ZERO = "id_zero"
    SPAN_TIMES = "span_times"
    UNREADABLE = "unreadable"
    UNSTORABLE = "unstorable"


class ForwardDropped(StrEnum):
    """Why a body was not forwarded, other than by a response of the destination."""

    QUEUE_FULL = "queue_full"
    STOPPING = "stopping"
    FAILED = "failed"
    UNREACHABLE = "unreachable"
    JSON_TO_GRPC = "json_to_grpc"


class ProxyFailure(StrEnum):
    """What failed for a proxied request: reading it, a call of the agent, or storing it."""

    SLO_HEADER = "slo_header"
    BODY_UNREADABLE = "body_unreadable"
    BODY_NOT_READ = "body_not_read"
    COMPRESSED_ANSWER = "compressed_answer"
    ANSWER_TOO_LARGE = "answer_too_large"
    ANSWER_UNREADABLE = "answer_unreadable"
    EVENT_UNREADABLE = "event_unreadable"
    ENGINE_TIMES = "engine_times"
    USAGE = "usage"
    MEASURING = "measuring"
    RECORD = "record"
    WANTS = "wants"
    BEGIN = "begin"
    SENT = "sent"
    ROUTED = "routed"
    ANSWERED = "answered"
    CHUNK = "chunk"
    CATCH_UP = "catch_up"
    ENDED = "ended"
    CHOOSE = "choose"
    RELAY = "relay"
    STORE_BEHIND = "store_behind"
    SPANS_BEHIND = "spans_behind"
    RECORD_REFUSED = "record_refused"
    WORKER_DIED = "worker_died"


class EjectionReason(StrEnum):
    """Why the proxy sends an engine no new requests for a time.

    `silent`: it sent nothing while others answered later requests. `event`: the agent reported that
    it died or hangs. `unhealthy`: it has no metrics, or its health check fails.
    """

    UNREACHABLE = "unreachable"
    RESET = "reset"
    TIMEOUT = "timeout"
    ERROR = "error"
    UNAVAILABLE = "unavailable"
    SILENT = "silent"
    EVENT = "event"
    UNHEALTHY = "unhealthy"


class WithoutRow(StrEnum):
    """What became of a request that an engine counted and that has no row.

    `aborted` left the engine unfinished, mostly since its client left: vLLM sends no span of it.
    `finished` ended by itself, but its span was sampled out, lost, refused or dropped. `died` was
    there when the engine ended. `refused` was not admitted. It is `unknown` of an engine that does
    not count finished requests by reason.
    """

    ABORTED = "aborted"
    FINISHED = "finished"
    DIED = "died"
    REFUSED = "refused"
    UNKNOWN = "unknown"


# The settings with the addresses of HTTP.
SOCKETS = ("listen", "otlp.http", "proxy.listen")


class ClientCut(StrEnum):
    """Why a client of a listening socket was cut off or refused."""

    HEAD_TOO_SLOW = "head_too_slow"
    HEAD_TOO_LARGE = "head_too_large"
    BODY_TOO_SLOW = "body_too_slow"
    RESPONSE_UNREAD = "response_unread"
    RESPONSES_WAIT = "responses_wait"
    TOO_MANY = "too_many"
    MALFORMED = "malformed"


class PluginDropped(StrEnum):
    """Why records of an engine's plugin were dropped.

    `agent_behind`: by the plugin, because the agent did not read. `lost`: on the way, as at the end
    of an agent. `unreadable`: a file of open requests. `too_many_wait`: requests that wait for
    their rows. `unknown_engine`: the sender's process listens on no engine's port.
    """

    AGENT_BEHIND = "agent_behind"
    LOST = "lost"
    NOT_OURS = "not_ours"
    OTHER_FORMAT = "other_format"
    MALFORMED = "malformed"
    TIME = "time"
    VALUE = "value"
    REQUEST_ID = "request_id"
    UNREADABLE = "unreadable"
    TOO_MANY_WAIT = "too_many_wait"
    UNKNOWN_ENGINE = "unknown_engine"


class StoreWrite(StrEnum):
    """A kind of write that the database refused."""

    REQUESTS = "requests"
    SETTLE = "settle"
    ROW_SET_ASIDE = "row_set_aside"
    FILE_SET_ASIDE = "file_set_aside"
    ENGINE_SAMPLES = "engine_samples"
    ENGINE_MINUTES = "engine_minutes"
    EVENTS = "events"
    EVENTS_DROPPED = "events_dropped"
    GPU_SAMPLES = "gpu_samples"
    PLUGIN_FIGURES = "plugin_figures"
    HELD_RATES = "held_rates"
    FOLD = "fold"
    EXPIRE = "expire"


class LostRows(StrEnum):
    """Why the shared database will never have a row.

    `age`: it waited for longer than storage.keep_in_file. `full`: a sample came while the agent's
    file was full; requests are then refused, and sent again. `refused`: by the shared database, for
    its content. `damaged`: it waited in a file that was set aside.
    """

    AGE = "age"
    FULL = "full"
    REFUSED = "refused"
    DAMAGED = "damaged"


class FiguresMissing(StrEnum):
    """Why figures of efficiency or cost are unknown or doubtful for an engine."""

    MODEL_CONFIG = "model_config"
    GPUS_MIXED = "gpus_mixed"
    GPU_SLICED = "gpu_sliced"
    GPU_UNKNOWN = "gpu_unknown"
    GPUS_DIFFER = "gpus_differ"
    RANKS_DIFFER = "ranks_differ"


class FetchFailed(StrEnum):
    """Why an exposition could not be fetched."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"
    HTTP_STATUS = "http_status"
    TOO_LARGE = "too_large"
    CUT_OFF = "cut_off"
    ENCODING = "encoding"


# After these, another request to the same engine would fail in the same way.
NO_ANSWER = frozenset({FetchFailed.TIMEOUT, FetchFailed.CONNECTION})


class ExpositionFault(StrEnum):
    """Why an exposition, or a part of it, cannot be read."""

    NOT_TEXT = "not_text"
    EMPTY = "empty"
    HTML = "html"
    JSON = "json"
    JSON_MALFORMED = "json_malformed"
    NO_KNOWN_SERIES = "no_known_series"
    LINE_MALFORMED = "line_malformed"
    VALUE_NOT_FINITE = "value_not_finite"
    VALUE_NEGATIVE = "value_negative"
    SERIES_REPEATED = "series_repeated"
    HISTOGRAM_INCOMPLETE = "histogram_incomplete"


class ValueDropped(StrEnum):
    """Why a value was stored as unknown."""

    WRONG_TYPE = "wrong_type"
    NOT_FINITE = "not_finite"
    NEGATIVE = "negative"
    LONGER_THAN_REQUEST = "longer_than_request"
    TOO_LARGE = "too_large"
    MORE_THAN_WHOLE = "more_than_whole"
    NO_OUTPUT = "no_output"
    ZERO = "zero"
    TOO_LONG = "too_long"
    CONTROL_CHARACTER = "control_character"
    ID_LENGTH = "id_length"
    CLOCK_AHEAD = "clock_ahead"
    LATE = "late"
    UNREADABLE = "unreadable"


INTERNAL = "internal"


def model_unknown(reason: str) -> str:
    """The reason for an unknown model name, made from the reason that the query failed."""
    return f"model_{reason}"


SCRAPES_FAILED: tuple[str, ...] = (
    *FetchFailed,
    *(fault for fault in ExpositionFault if fault is not ExpositionFault.JSON_MALFORMED),
    *(model_unknown(fault) for fault in (*FetchFailed, ExpositionFault.JSON_MALFORMED)),
    INTERNAL,
)

_Why = ValueDropped
_TEXT = (_Why.WRONG_TYPE, _Why.CONTROL_CHARACTER, _Why.TOO_LONG)
_BY_TYPE = {
    ValueType.SECONDS: (_Why.WRONG_TYPE, _Why.NOT_FINITE, _Why.NEGATIVE, _Why.LONGER_THAN_REQUEST),
    ValueType.COUNT: (_Why.WRONG_TYPE, _Why.NEGATIVE),
    ValueType.TEXT: _TEXT,
}
_BY_FIELD = {
    "ttft_s": (_Why.NO_OUTPUT, _Why.ZERO),
    "prefill_s": (_Why.NO_OUTPUT,),
    "decode_s": (_Why.NO_OUTPUT,),
    "input_tokens": (_Why.TOO_LARGE,),
    "output_tokens": (_Why.TOO_LARGE,),
    "cached_tokens": (_Why.MORE_THAN_WHOLE,),
    "reasoning_tokens": (_Why.MORE_THAN_WHOLE,),
    "started_at": (_Why.CLOCK_AHEAD, _Why.LATE),
    "parent_span_id": (_Why.ID_LENGTH,),
    "resource": (_Why.UNREADABLE,),
    "engine": _TEXT,
    "service_name": _TEXT,
}


def _dropped_values() -> Iterator[tuple[str, ValueDropped]]:
    for name, kind, _ in REQUEST_ATTRIBUTES.values():
        yield from ((name, reason) for reason in _BY_TYPE[kind])
    for name, reasons in _BY_FIELD.items():
        yield from ((name, reason) for reason in reasons)


# Every possible pair of field and reason.
VALUES_DROPPED = tuple(dict.fromkeys(_dropped_values()))

# google.rpc.Code, all but OK.
_GRPC_CODES = (
    "cancelled", "unknown", "invalid_argument", "deadline_exceeded", "not_found", "already_exists",
    "permission_denied", "resource_exhausted", "failed_precondition", "aborted", "out_of_range",
    "unimplemented", "internal", "unavailable", "data_loss", "unauthenticated",
)  # fmt: skip
# Responses of collectors and of proxies in front of them.
_HTTP_STATUSES = (
    301, 302, 303, 307, 308, 400, 401, 403, 404, 405, 408, 413, 415, 429, 500, 501, 502, 503, 504,
)  # fmt: skip
_HTTP_OTHER = "http_other"


def grpc_reason(code: str) -> str:
    """The reason for a gRPC status of a destination, by the name of its code."""
    return f"grpc_{code.lower()}"


def http_reason(status: int) -> str:
    """The reason for an HTTP status of a destination; rare ones share a reason."""
    return f"http_{status}" if status in _HTTP_STATUSES else _HTTP_OTHER


FORWARDS_DROPPED: tuple[str, ...] = (
    *ForwardDropped,
    *(http_reason(status) for status in _HTTP_STATUSES),
    _HTTP_OTHER,
    *(grpc_reason(code) for code in _GRPC_CODES),
)

# An export of metrics is protobuf over HTTP.
PUSHES_DROPPED = tuple(why for why in FORWARDS_DROPPED if "grpc" not in why)
