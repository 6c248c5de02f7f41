"""Self-signed certificates for 127.0.0.1, made by openssl."""

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate and its key, in PEM files."""

    certificate: Path
    key: Path

    def replace_by(self, other: "Certificate") -> None:
        """Put another certificate and its key into these files."""
        self.key.write_bytes(other.key.read_bytes())
        self.certificate.write_bytes(other.certificate.read_bytes())


def make_certificate(folder: Path, name: str) -> Certificate:
    """A new certificate with this common name."""
    made = Certificate(folder / f"{name}.crt", folder / f"{name}.key")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subject = ["-nodes", "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(made.key), "-out", str(made.certificate)]
    subprocess.run([*command, *subject, *files], check=True, capture_output=True)
    return made
