"""TLS of the agent's own addresses, from a certificate and a key that may be replaced."""

import logging
import ssl
from pathlib import Path
from threading import Lock
from typing import Any

import grpc

from agent.errors import SettingsInvalid

_LOG = logging.getLogger(__name__)


class TlsFiles:
    """A certificate and its key. A handshake uses new ones as soon as both fit each other."""

    def __init__(self, certificate: Path, key: Path) -> None:
        """Read the files. Raises SettingsInvalid."""
        self._files = (certificate, key)
        self._lock = Lock()
        self._stamp = self._read_stamp()
        try:
            self._newest = self._load()
        except (OSError, ssl.SSLError) as error:
            raise SettingsInvalid(
                [f"security.tls_certificate: {certificate} and {key} cannot be used: {error}"]
            ) from error

    def context(self) -> ssl.SSLContext:
        """A context for servers, which takes the newest certificate at each handshake."""
        return self._newest

    def credentials(self) -> grpc.ServerCredentials:
        """The same for gRPC."""
        return grpc.dynamic_ssl_server_credentials(
            self._of_grpc(), self._newest_of_grpc, require_client_authentication=False
        )

    def _use_newest(self, connection: Any, _name: str | None, _context: ssl.SSLContext) -> None:
        with self._lock:
            self._refresh()
            connection.context = self._newest

    def _newest_of_grpc(self) -> grpc.ServerCertificateConfiguration:
        with self._lock:
            self._refresh()
        return self._of_grpc()

    def _of_grpc(self) -> grpc.ServerCertificateConfiguration:
        certificate, key = self._pem
        return grpc.ssl_server_certificate_configuration([(key, certificate)])

    def _refresh(self) -> None:
        stamp = self._read_stamp()
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._newest = self._load()
        except (OSError, ssl.SSLError) as error:
            _LOG.warning("the new TLS files cannot be used, and the former stay: %s", error)
        else:
            _LOG.info("the TLS certificate was read again")

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*self._files)
        context.sni_callback = self._use_newest
        certificate, key = (file.read_bytes() for file in self._files)
        self._pem = certificate, key
        return context

    def _read_stamp(self) -> object:
        try:
            found = [file.stat() for file in self._files]
        except OSError:
            return "absent"
        return [(each.st_ino, each.st_mtime_ns, each.st_size) for each in found]
