"""Where the workers of the proxy and the agent meet."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class HandoverPlace:
    """A socket in a folder that only this user may enter, and the run of the supervisor."""

    socket: Path
    run: str
