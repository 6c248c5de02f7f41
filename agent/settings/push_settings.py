"""Settings of the push of metrics."""

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr

from agent.settings.section import Section
from agent.settings.values import Duration, HttpUrl, WholeNumber

# RFC 9110, section 5: a field's name is a token, and its value has no control characters.
_NAME = r"^[A-Za-z0-9!#$%&'*+.^_`|~-]+$"
_VALUE = re.compile(r"[\x21-\x7e]([\x20-\x7e]*[\x21-\x7e])?")


def _text(value: object) -> object:
    """A number as YAML reads it, such as the tenant 42, as text."""
    return str(value) if isinstance(value, int) else value


def _header_value(value: SecretStr) -> SecretStr:
    if not _VALUE.fullmatch(value.get_secret_value()):
        raise ValueError("a header's value is of visible ASCII characters, with spaces inside only")
    return value


_HeaderName = Annotated[str, Field(pattern=_NAME)]
_HeaderValue = Annotated[SecretStr, BeforeValidator(_text), AfterValidator(_header_value)]


class OtlpMetricsSettings(Section):
    """The push of the agent's metrics over OTLP, beside `/metrics` (docs/metrics-push.md)."""

    endpoint: HttpUrl | None = None
    """Where metrics are sent as protobuf over HTTP, as in `http://collector:4318`; null: nowhere.

    A URL without a path gets `/v1/metrics`."""
    headers: dict[_HeaderName, _HeaderValue] = Field(default={})
    """Headers of each export, as in `{X-Scope-OrgID: fleet}`; their values are never shown."""
    interval: Duration = Field(default="15s")  # type: ignore[assignment]
    """Time between two exports."""
    timeout: Duration = Field(default="10s")  # type: ignore[assignment]
    """How long the endpoint may take to respond to an export."""
    compression: Literal["gzip", "none"] = "gzip"
    """How an export is compressed."""
    histograms: Literal["exponential", "explicit"] = "exponential"
    """How the latencies of requests are sent; `explicit` has the buckets of `/metrics`."""
    max_buckets: WholeNumber = Field(default=160, ge=40, le=2400)
    """Buckets of an exponential histogram; where more are needed, two neighbours become one."""
    resource: dict[str, str] = Field(default={})
    """More attributes of the resource, as in `{k8s.cluster.name: eu-1}`."""
