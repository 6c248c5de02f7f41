"""An OTLP body as it was received."""

from dataclasses import dataclass

from agent.sources.otlp.payload import PROTOBUF


@dataclass(frozen=True, slots=True)
class Body:
    """The bytes of an export; forwarding sends these."""

    content: bytes
    content_type: str = PROTOBUF
    gzipped: bool = False
