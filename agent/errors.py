"""The error tree: every error that the agent raises by name.

AgentError
├── SettingsInvalid       the settings file or environment cannot be used; lists every problem
├── ExpositionUnreadable  an engine's response is no exposition; carries a reason
├── EngineUnreachable     an engine did not answer in time
├── PayloadInvalid        an OTLP body that is invalid, also on a retry
├── PayloadTooLarge       an OTLP body over the limit after decompression
└── StoreUnavailable      the database cannot write or read now; a retry may succeed
"""

from collections.abc import Sequence


class AgentError(Exception):
    """The base class of all errors of the agent."""


class SettingsInvalid(AgentError):
    """The settings cannot be used; `problems` lists all of them, one sentence each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


class EngineUnreachable(AgentError):
    """An engine did not answer; `reason` is the label of a counter."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class ExpositionUnreadable(AgentError):
    """An engine's response is no exposition, or cannot be read; `reason` is for counting."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class PayloadInvalid(AgentError):
    """An OTLP body that cannot be read; sending it again does not help."""


class PayloadTooLarge(AgentError):
    """An OTLP body over the limit, counted after decompression."""


class StoreUnavailable(AgentError):
    """The database cannot write or read now; the same call may succeed later."""
