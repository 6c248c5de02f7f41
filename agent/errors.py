"""The error tree: every error that the agent raises by name.

AgentError
├── SettingsInvalid       the settings file or environment cannot be used; lists every problem
├── ReadFailed            an engine or an exporter was not read; carries a reason
│   ├── EngineUnreachable     it did not answer, or with an error
│   └── ExpositionUnreadable  its response is not an exposition
├── DiscoveryFailed       the list of engines cannot be read now; a retry may succeed
├── PayloadInvalid        an OTLP body that is invalid, also on a retry
├── PayloadTooLarge       an OTLP body over the limit after decompression
└── StoreUnavailable      the database cannot write or read now; a retry may succeed
    └── QueryTooSlow      a query was ended at its limit of time
"""

from collections.abc import Sequence


class AgentError(Exception):
    """The base class of all errors of the agent."""

    @property
    def public(self) -> str:
        """What anybody may read of it."""
        return str(self)


class SettingsInvalid(AgentError):
    """The settings cannot be used; `problems` lists all of them, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class ReadFailed(AgentError):
    """An engine or an exporter was not read; `reason` is the label of a counter.

    `message` begins with a verb: its subject is `where`, the URL, which `public` leaves out.
    """

    def __init__(
        self, reason: str, message: str, *, where: str = "", status: int | None = None
    ) -> None:
        """`status` is that of an HTTP response, if it is the failure."""
        super().__init__(f"{where} {message}".lstrip())
        self.reason = reason
        self.message = message
        self.where = where
        self.status = status

    @property
    def public(self) -> str:
        """The message without the URL."""
        return self.message


class EngineUnreachable(ReadFailed):
    """It did not answer, or with an error."""


class ExpositionUnreadable(ReadFailed):
    """Its response is not an exposition, or cannot be read."""


class DiscoveryFailed(AgentError):
    """The list of engines cannot be read now, but maybe later; `reason` is for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PayloadInvalid(AgentError):
    """An OTLP body that cannot be read; sending it again does not help."""


class PayloadTooLarge(AgentError):
    """An OTLP body over the limit, counted after decompression."""


class StoreUnavailable(AgentError):
    """The database cannot write or read now; the same call may succeed later.

    `cause` is the driver's message: it may name the database's host and user, so it is only logged.
    """

    def __init__(self, sentence: str, cause: str | None = None) -> None:
        super().__init__(sentence if cause is None else f"{sentence}: {cause}")
        self._sentence = sentence

    @property
    def public(self) -> str:
        """The sentence without its cause."""
        return self._sentence


class QueryTooSlow(StoreUnavailable):
    """A query took longer than it may."""

    def __init__(self) -> None:
        super().__init__(
            "the query took longer than storage.query_timeout; choose a shorter window or limit"
        )
