"""Renderings of the Helm charts for the values files in helm/values."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.deploy.dockerfile import ROOT
from tests.real_parts.helm import documents, rendered, run

CHARTS = ROOT / "deploy" / "helm"
CHART = CHARTS / "goodput-agent"
FOLDER = Path(__file__).parent / "helm"
VALUES = {path.stem: path for path in sorted((FOLDER / "values").glob("*.yaml"))}
# A chart of an operator's own that has ours as a dependency.
YOURS = "your-vllm"
NAMES = (*VALUES, YOURS)
_SCHEMAS = Path(__file__).parent / "schemas"
_KUBERNETES = "1.37"


@cache
def rendering(name: str) -> str:
    """What Helm makes of a values file, or of the operator's own chart."""
    if name != YOURS:
        return rendered(CHART, "--values", VALUES[name])
    with tempfile.TemporaryDirectory() as folder:
        chart = with_dependency(Path(folder))
        return rendered(chart, "--set", "goodput-agent.dashboards.enabled=false")


def with_dependency(folder: Path) -> Path:
    """A copy of the operator's own chart, with ours inside of it."""
    chart = Path(shutil.copytree(CHARTS / YOURS, folder / YOURS))
    shutil.copytree(CHART, folder / CHART.name)
    run("helm", "dependency", "build", chart)
    return chart


def objects(name: str) -> Sequence[dict[str, Any]]:
    """The objects of a rendering."""
    return documents(rendering(name))


def only(name: str, kind: str) -> dict[str, Any]:
    """The one object of a kind."""
    (found,) = (found for found in objects(name) if found["kind"] == kind)
    return found


def pod(name: str) -> dict[str, Any]:
    """The template of the one pod of a rendering."""
    (found,) = (o for o in objects(name) if o["kind"] in {"Deployment", "DaemonSet"})
    template: dict[str, Any] = found["spec"]["template"]
    return template


def agent_container(name: str) -> dict[str, Any]:
    """The agent's container."""
    containers = pod(name)["spec"]["containers"]
    found: dict[str, Any] = next(each for each in containers if each["name"] == "agent")
    return found


def check(found: Mapping[str, Any]) -> None:
    """Raise what Kubernetes or the Prometheus Operator would say against an object."""
    if found["apiVersion"].startswith("monitoring.coreos.com/"):
        schema = yaml.safe_load((_SCHEMAS / f"{found['kind'].lower()}.json").read_text("utf-8"))
        Draft202012Validator(schema).validate(found)
    else:
        kubernetes_validate.validate(found, _KUBERNETES, strict=True)
