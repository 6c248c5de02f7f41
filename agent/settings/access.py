"""Access to a listener: its settings, the names in a Host header, and tokens.

A page of another site can make a browser call this machine under that site's own name (DNS
rebinding). So a name must be known; a number cannot be rebound."""

import hashlib
import hmac
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from agent.errors import SettingsInvalid
from agent.settings.named_files import follow, read_named_file
from agent.settings.values import Section, host_and_port

_HostName = Annotated[str, Field(pattern=r"^(\*\.)?[A-Za-z0-9_.-]+$", max_length=253)]


class SecuritySettings(Section):
    """Who may come in.

    Without tokens, an address that other machines reach is refused unless `insecure` is true, and a
    request must name the agent by a number, as localhost, by the host it listens on, or as one of
    `allowed_hosts`.
    """

    insecure: bool = False
    """Whether other machines are let in without a token."""
    read_tokens: Path | None = None
    """File with a bearer token on each line, for the API and the metrics."""
    ingest_tokens: Path | None = None
    """File with a bearer token on each line, for spans."""
    allowed_hosts: tuple[_HostName, ...] = ()
    """Names of the agent in URLs if it has no tokens; `*.example.org`: all names below."""
    tls_certificate: Path | None = None
    """PEM file of the certificate for every address."""
    tls_key: Path | None = Field(default=None, validate_default=True)
    """PEM file of the certificate's key."""

    @field_validator("tls_key")
    @classmethod
    def _is_of_a_certificate(cls, key: Path | None, others: ValidationInfo) -> Path | None:
        certificate = others.data.get("tls_certificate")
        if (key is None) != (certificate is None):
            raise ValueError("a certificate and its key go together; set tls_certificate, too")
        return key

    def check_locked(self, sections: Mapping[str, Any]) -> None:
        """Raise ValueError for addresses of `listen` and `otlp` that others reach without a token.

        A section with a problem of its own is absent.
        """
        if self.insecure or not {"listen", "otlp"} <= sections.keys():
            return
        listeners = [("listen.host", sections["listen"].host, "read_tokens", self.read_tokens)]
        for name in ("grpc", "http"):
            address = getattr(sections["otlp"], name)
            if address is not None:
                host, _ = host_and_port(address)
                listeners.append((f"otlp.{name}", host, "ingest_tokens", self.ingest_tokens))
        open_to_all = [
            f"{name} {host} is open to other machines without a token: set security.{key} to a "
            "file of tokens, or start with --insecure (security.insecure: true)"
            for name, host, key, tokens in listeners
            if tokens is None and not is_loopback(host)
        ]
        if open_to_all:
            raise ValueError("; ".join(open_to_all))


class TlsSettings(Section):
    """TLS of connections that the agent opens: to engines, dcgm-exporter and OTLP endpoints."""

    ca: Path | None = None
    """PEM file of authorities that are trusted beside the system's, as of a private CA."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a host."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


_LOG = logging.getLogger(__name__)

SHORTEST_TOKEN = 16
# A request is compared with each token of the file.
_TOKENS_BYTES = 64 * 1024

_BEARER = "bearer "


class AccessRefusal(Enum):
    """Why a client may not use the agent, with a sentence for it."""

    HOST = "the agent is not known by the name in the Host header; see security.allowed_hosts"
    TOKEN = "send a valid token, as in Authorization: Bearer TOKEN"


class TokenFile:
    """The tokens of a file, one on each line. If it cannot be read or used, no client is allowed.

    Safe on every thread.
    """

    def __init__(self, setting: str, path: Path) -> None:
        """Read the file. Raises SettingsInvalid."""
        self._setting = setting
        self._path = path
        self._content = b""
        self._digests: tuple[bytes, ...] = ()
        self._problem: str | None = None
        try:
            self._read()
        except (OSError, ValueError) as error:
            raise SettingsInvalid([self._sentence(error)]) from error

    def follow(self) -> None:
        """Read the file every second from now on, in a thread of its own."""
        follow(self.refresh, str(self._path))

    def refresh(self) -> None:
        """Read the file now. While its file system does not respond, the tokens stay valid."""
        problem = None
        try:
            self._read()
        except TimeoutError as error:
            problem = f"{self._sentence(error)}; its former tokens stay valid"
        except (OSError, ValueError) as error:
            self._content, self._digests = b"", ()
            problem = f"{self._sentence(error)}; every request is refused until it is corrected"
        if problem not in (None, self._problem):
            _LOG.warning(problem)
        self._problem = problem

    def holds(self, token: str) -> bool:
        """Whether the file holds this token, in a time that does not depend on the tokens."""
        given = _digest(token)
        # A list, so that each is compared.
        return any([hmac.compare_digest(given, digest) for digest in self._digests])

    def _read(self) -> None:
        """Take the tokens of the file. Raises OSError or ValueError."""
        content = hashlib.sha256(read := read_named_file(self._path, max_bytes=_TOKENS_BYTES))
        # Compared whole: a file may be rewritten with the same size within the clock of its times.
        if content.digest() != self._content:
            self._digests = _digests(read)
            self._content = content.digest()

    def _sentence(self, error: Exception) -> str:
        if isinstance(error, OSError):
            return f"{self._setting}: {self._path} cannot be read: {error}"
        return f"{self._setting}: {self._path} {error}"


def _digests(content: bytes) -> tuple[bytes, ...]:
    """Those of the tokens in a file. Raises ValueError without a usable one."""
    tokens = content.decode("utf-8", "replace").split()
    if "\ufffd" in "".join(tokens):
        raise ValueError("must hold tokens in UTF-8")
    if not tokens or min(map(len, tokens)) < SHORTEST_TOKEN:
        raise ValueError(
            f"must hold one token on each line, each of at least {SHORTEST_TOKEN} characters"
        )
    return tuple(map(_digest, tokens))


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


@dataclass(frozen=True, slots=True)
class AccessPolicy:
    """Who may use one listener; without `tokens` every client may."""

    hosts: frozenset[str] | None = None
    tokens: TokenFile | None = None

    def refusal(self, host: str | None, authorization: str | None) -> AccessRefusal | None:
        """Why a request with these headers is refused; None if it is allowed."""
        if not self.allows_host(host):
            return AccessRefusal.HOST
        return None if self.is_authorized(authorization) else AccessRefusal.TOKEN

    def allows_host(self, host: str | None) -> bool:
        """Whether the Host header is allowed. Clients other than browsers may omit it."""
        return self.hosts is None or host is None or _is_known(_name(host), self.hosts)

    def is_authorized(self, authorization: str | None) -> bool:
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
