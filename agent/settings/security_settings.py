"""Settings of who may come in: tokens, TLS, and the names that the agent is called by."""

from collections.abc import Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationInfo, field_validator

from agent.settings.section import Section
from agent.settings.values import host_and_port

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
    """Names of the agent in URLs where it has no tokens; `*.example.org`: all names below."""
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
        doors = [("listen.host", sections["listen"].host, "read_tokens", self.read_tokens)]
        for name in ("grpc", "http"):
            address = getattr(sections["otlp"], name)
            if address is not None:
                host, _ = host_and_port(address)
                doors.append((f"otlp.{name}", host, "ingest_tokens", self.ingest_tokens))
        open_to_all = [
            f"{name} {host} is open to other machines without a token: set security.{key} to a "
            "file of tokens, or start with --insecure (security.insecure: true)"
            for name, host, key, tokens in doors
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
