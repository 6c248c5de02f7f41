"""TLS of the agent's own addresses, from a certificate and a key that may be replaced."""

import logging
import os
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from agent.errors import SettingsInvalid
from agent.settings.named_files import follow, read_named_file

_LOG = logging.getLogger(__name__)


class TlsFiles:
    """A certificate and its key. New ones are used as soon as both fit each other."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises SettingsInvalid."""
        self._files = (certificate, key)
        self._problem: str | None = None
        try:
            self._pem = self._read()
            self._newest = self._context(self._pem)
        except (OSError, ValueError) as error:
            raise SettingsInvalid(
                [f"security.tls_certificate: {certificate} and {key} cannot be used: {error}"]
            ) from error

    def follow(self) -> None:
        """Read the files every second from now on, in a thread of its own."""
        follow(self.refresh, str(self._files[0]))

    def refresh(self) -> None:
        """Read the files now. If they cannot be used, the former ones stay in use."""
        problem = None
        try:
            pem = self._read()
            if pem != self._pem:
                self._newest, self._pem = self._context(pem), pem
                _LOG.info("the TLS certificate was read again")
        except (OSError, ValueError) as error:
            problem = f"the new TLS files cannot be used, and the former stay: {error}"
        if problem not in (None, self._problem):
            _LOG.warning(problem)
        self._problem = problem

    def context(self) -> ssl.SSLContext:
        """A context for servers, which takes the newest certificate at each handshake."""
        return self._newest

    def credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC."""
        return grpc.dynamic_ssl_server_credentials(
            self._of_grpc(), self._of_grpc, require_client_authentication=False
        )

    def _use_newest(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = self._newest

    def _of_grpc(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._pem
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def _read(self) -> Sequence[bytes]:
        return [_content(file) for file in self._files]

    def _context(self, pem: Sequence[bytes]) -> ssl.SSLContext:
        """Raises ssl.SSLError, an OSError, or ValueError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # The library reads files alone: these are in memory.
        copies = [os.memfd_create("pem") for _ in pem]
        try:
            for copy, content in zip(copies, pem, strict=True):
                os.write(copy, content)
            certificate, key = (f"/proc/self/fd/{copy}" for copy in copies)
            # Without a password it would ask for one at the terminal.
            context.load_cert_chain(certificate, key, password="")
        finally:
            for copy in copies:
                os.close(copy)
        context.sni_callback = self._use_newest
        return context


def _content(file: Path) -> bytes:
    try:
        return read_named_file(file)
    except OSError as error:
        raise OSError(f"{file}: {error}") from error
