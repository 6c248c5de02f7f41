"""The engine of a pod, and whether it is one that the agent should watch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

Pod = Mapping[str, Any]


class FoundEngine(NamedTuple):
    """The name of an engine, and its URL."""

    name: str
    url: str


def engine_of(pod: Pod, port: int | str, *, with_namespace: bool) -> FoundEngine | None:
    """The engine of a pod; None where it should not be watched now, or has no such port."""
    number = port if isinstance(port, int) else _port(pod, port)
    address = pod.get("status", {}).get("podIP")
    if number is None or not address or not _was_ready(pod):
        return None
    meta = pod["metadata"]
    name = f"{meta['namespace']}/{meta['name']}" if with_namespace else meta["name"]
    shown = f"[{address}]" if ":" in address else address
    return FoundEngine(name, f"http://{shown}:{number}")


def _port(pod: Pod, name: str) -> int | None:
    ports = (port for each in pod["spec"]["containers"] for port in each.get("ports", ()))
    return next((port["containerPort"] for port in ports if port.get("name") == name), None)


def _was_ready(pod: Pod) -> bool:
    """Whether the pod was ready at some time, and is not being deleted.

    An engine that still loads its model must not count as down. An engine that was ready and now
    hangs or restarts must stay watched. An engine whose pod is deleted must not count as dead.
    """
    status = pod.get("status", {})
    if status.get("phase") != "Running" or "deletionTimestamp" in pod["metadata"]:
        return False
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    ready = conditions.get("Ready")
    if ready is None or ready["status"] == "True":
        return ready is not None
    restarts = sum(each.get("restartCount", 0) for each in status.get("containerStatuses", ()))
    return restarts > 0 or _turned_unready(ready, conditions.get("Initialized"))


def _turned_unready(ready: Mapping[str, Any], initialized: Mapping[str, Any] | None) -> bool:
    """Whether the pod became unready after the start of its containers.

    In a pod that was never ready, both conditions changed at the same time. Times in RFC 3339 sort
    as texts.
    """
    if initialized is None:
        return False
    return str(ready.get("lastTransitionTime")) > str(initialized.get("lastTransitionTime"))
