"""Settings of the discovery of engines."""

from typing import Annotated, Literal

from pydantic import Field

from agent.settings.section import Section
from agent.settings.values import Duration, HttpUrl, WholeNumber

_Port = Annotated[WholeNumber, Field(ge=1, le=65535)]
_PortName = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=15)]
_Namespace = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]*[a-z0-9])?$", max_length=63)]


class KubernetesSettings(Section):
    """Engines in the pods that a label selects; unset: none are looked for (docs/kubernetes.md)."""

    selector: str = Field(min_length=1, max_length=1000)
    """The label selector of the pods, as in `app.kubernetes.io/name=vllm`."""
    namespaces: tuple[_Namespace, ...] = ()
    """The namespaces of the pods; empty: all, for which the agent needs rights in the cluster."""
    node: str | None = Field(default=None, min_length=1, max_length=253)
    """The node of the pods; null: any."""
    port: _Port | _PortName = 8000
    """The engine's port in the pod: its number, or the name that a container gives it."""
    name: Literal["pod", "namespace/pod"] = "pod"
    """What an engine is named after. Its spans must carry the same as `OTEL_SERVICE_NAME`."""
    kind: Literal["auto", "vllm", "sglang", "tgi", "trtllm"] = "auto"
    """The program that runs there; `auto` tells it by its metrics."""
    scrape_interval: Duration = Field(default="5s")  # type: ignore[assignment]
    """Time between two polls of an engine."""
    api: HttpUrl | None = None
    """The API server; null: that of the cluster in which the agent runs."""
    service_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    """The folder with the `token` and the `ca.crt` of the agent's service account."""


class DiscoverySettings(Section):
    """Where engines are found while the agent runs, beside those of `engines`."""

    kubernetes: KubernetesSettings | None = None
