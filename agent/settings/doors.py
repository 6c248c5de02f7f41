"""Who may come in by an address: the names that it is called by, and the tokens of those who call.

A page of another site can make a browser call this machine under that site's own name (DNS
rebinding). So a name must be known; a number cannot be rebound.
"""

import hashlib
import hmac
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from threading import Lock

from agent.errors import SettingsInvalid

_LOG = logging.getLogger(__name__)

SHORTEST_TOKEN = 16

_BEARER = "bearer "


class DoorRefusal(Enum):
    """Why somebody may not come in, with the sentence for them."""

    HOST = "the agent is not known by the name in the Host header; see security.allowed_hosts"
    TOKEN = "send a valid token, as in Authorization: Bearer TOKEN"


class TokenFile:
    """The tokens of a file, one on each line; it is read again when it has changed.

    Safe on every thread. A file that cannot be read lets nobody in.
    """

    def __init__(self, setting: str, path: Path) -> None:
        """Read the file. Raises SettingsInvalid."""
        self._setting = setting
        self._path = path
        self._lock = Lock()
        self._stamp: object = None
        self._digests: tuple[bytes, ...] = ()
        problem = self._refresh()
        if problem is not None:
            raise SettingsInvalid([problem])

    def holds(self, token: str) -> bool:
        """Whether the file holds this token, in a time that does not depend on the tokens."""
        with self._lock:
            problem = self._refresh()
            digests = self._digests
        if problem is not None:
            _LOG.warning("%s; nobody is let in until it is corrected", problem)
        given = _digest(token)
        # A list, so that each is compared.
        return any([hmac.compare_digest(given, digest) for digest in digests])

    def _refresh(self) -> str | None:
        """Read the file if it has changed; returns what is wrong with it, once a change."""
        stamp = _stamp(self._path)
        if stamp == self._stamp:
            return None
        self._stamp, self._digests = stamp, ()
        try:
            tokens = self._path.read_text(encoding="utf-8").split()
        except (OSError, UnicodeDecodeError) as error:
            return f"{self._setting}: {self._path} cannot be read: {error}"
        if not tokens or min(map(len, tokens)) < SHORTEST_TOKEN:
            return (
                f"{self._setting}: {self._path} must hold one token on each line, each of at least "
                f"{SHORTEST_TOKEN} characters"
            )
        self._digests = tuple(map(_digest, tokens))
        return None


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except OSError:
        return "absent"
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class Door:
    """The check of one address; without `tokens` anybody may come in."""

    hosts: frozenset[str] | None = None
    tokens: TokenFile | None = None

    def refusal(self, host: str | None, authorization: str | None) -> DoorRefusal | None:
        """Why a request with these headers may not come in; None if it may."""
        if not self.is_known(host):
            return DoorRefusal.HOST
        return None if self.lets_in(authorization) else DoorRefusal.TOKEN

    def is_known(self, host: str | None) -> bool:
        """Whether the agent is called by this name; programs that are no browser may send none."""
        return self.hosts is None or host is None or _is_known(_name(host), self.hosts)

    def lets_in(self, authorization: str | None) -> bool:
        """Whether an Authorization header has a token."""
        if self.tokens is None:
            return True
        given = authorization or ""
        is_bearer = given[: len(_BEARER)].lower() == _BEARER
        return is_bearer and self.tokens.holds(given[len(_BEARER) :].strip())


def _name(host: str) -> str:
    """The host of a Host header, without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower().rstrip(".")


def _is_known(name: str, hosts: frozenset[str]) -> bool:
    if name in hosts or name == "localhost" or name.endswith(".localhost"):
        return True
    parts = name.split(".")
    if any("*." + ".".join(parts[start:]) in hosts for start in range(1, len(parts))):
        return True
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


def known_hosts(listen: str, allowed: Iterable[str]) -> frozenset[str]:
    """The names of an agent that listens on a host and has further names."""
    return frozenset(name.lower() for name in (listen, *allowed))
