"""The kustomization, built by the real kubectl."""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.charts import check
from tests.deploy.dockerfile import ROOT
from tests.real_parts.helm import documents, run

FOLDER = ROOT / "deploy" / "kubernetes"


@pytest.fixture(scope="module")
def built() -> dict[tuple[str, str], Any]:
    """The objects by kind and name, the name without the digest of a ConfigMap's content."""
    text = run("kubectl", "kustomize", "--load-restrictor", "LoadRestrictionsNone", FOLDER)
    return {
        (found["kind"], found["metadata"]["name"].replace(digest(found), "")): found
        for found in documents(text)
    }


def digest(found: dict[str, Any]) -> str:
    name = found["metadata"]["name"]
    return f"-{name.rpartition('-')[2]}" if name.startswith("goodput-agent-settings-") else ""


def test_kubernetes_accepts_every_object(built: dict[tuple[str, str], Any]) -> None:
    assert len(built) == 8
    for found in built.values():
        check(found)


def test_the_pod_mounts_the_settings_of_the_folder(built: dict[tuple[str, str], Any]) -> None:
    settings = built["ConfigMap", "goodput-agent-settings"]
    assert settings["data"]["settings.yml"] == (FOLDER / "agent.yml").read_text(encoding="utf-8")
    volumes = built["Deployment", "vllm"]["spec"]["template"]["spec"]["volumes"]
    mounted = {each["configMap"]["name"] for each in volumes if "configMap" in each}
    assert mounted == {settings["metadata"]["name"]}


def test_the_dashboards_are_whole(built: dict[tuple[str, str], Any]) -> None:
    made = built["ConfigMap", "goodput-agent-dashboards"]
    files: list[Path] = sorted((ROOT / "dashboards").glob("*.json"))
    assert made["data"] == {path.name: path.read_text(encoding="utf-8") for path in files}
    assert made["metadata"]["labels"]["grafana_dashboard"] == "1"
