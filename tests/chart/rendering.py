"""The chart as Helm renders it, and questions that several tests ask of the result."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

helm = pytest.importorskip("helm_python", reason="Helm cannot be had here: the extra `chart` is not installed")

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "k8s"
# Every way in which the chart is rendered here, and the values that it takes.
PROFILES: dict[str, Path | None] = {
    "default": None,
    "cpu": CHART / "values-cpu.yaml",
    "gpu": CHART / "values-gpu.yaml",
    "everything": Path(__file__).parent / "profiles" / "everything.yaml",
    "tls": CHART / "values-tls.yaml",
    "mutual": Path(__file__).parent / "profiles" / "mutual.yaml",
    "keda": CHART / "values-keda.yaml",
    "bare": Path(__file__).parent / "profiles" / "bare.yaml",
    "image-volume": Path(__file__).parent / "profiles" / "image-volume.yaml",
    "models": Path(__file__).parent / "profiles" / "models.yaml",
}
# Those with one of each component; what holds for one model holds for each of several (test_models.py).
ONE_MODEL = [profile for profile in PROFILES if profile != "models"]
RELEASE = "demo"
NAMESPACE = "models"
# What people bring along, and name in values.
GIVEN = {
    ("PersistentVolumeClaim", "target-weights"),
    ("PersistentVolumeClaim", "drafter-weights"),
    ("PersistentVolumeClaim", "weights"),
    ("Secret", "cache"),
    ("Secret", "pull"),
    ("Secret", "front-door"),
    ("Secret", "back-ends"),
    ("Secret", "tokens"),
}

Manifest = dict[str, Any]


def values_of(profile: str) -> dict[str, Any]:
    path = PROFILES[profile]
    return yaml.safe_load(path.read_text()) if path else {}


def render(values: dict[str, Any], release: str = RELEASE) -> list[Manifest]:
    """What an installation with these values consists of.

    Raises:
        helm_python.HelmError: the values do not fit the schema, or a template fails.
    """
    with helm.Chart.load(CHART) as chart:
        files = chart.render(values, name=release, namespace=NAMESPACE)
    return [
        manifest
        for name, text in sorted(files.items())
        if name.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest is not None
    ]


@cache
def rendered(profile: str) -> list[Manifest]:
    """What an installation of a profile consists of; not to be changed."""
    return render(values_of(profile))


def notes(profile: str) -> str:
    """What is told after an installation of a profile."""
    return notes_of(values_of(profile))


def notes_of(values: dict[str, Any]) -> str:
    """What is told after an installation with these values."""
    with helm.Chart.load(CHART) as chart:
        return chart.render(values, name=RELEASE, namespace=NAMESPACE)["coppice/templates/NOTES.txt"]


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def name_of(manifest: Manifest) -> str:
    return manifest["metadata"]["name"]


def component(manifest: Manifest) -> str:
    return manifest["metadata"]["labels"]["app.kubernetes.io/component"]


def workloads(manifests: list[Manifest]) -> list[Manifest]:
    """What runs and stays."""
    return of_kind(manifests, "Deployment", "StatefulSet")


def services_of_ours(manifests: list[Manifest]) -> list[Manifest]:
    """Workloads that run one of our services, the gateway among them."""
    return [workload for workload in workloads(manifests) if component(workload) != "redis"]


def grpc_services(manifests: list[Manifest]) -> list[Manifest]:
    """Workloads that serve gRPC: all of ours but the gateway."""
    return [workload for workload in services_of_ours(manifests) if component(workload) != "gateway"]


def pods(manifests: list[Manifest]) -> Iterator[tuple[str, Manifest, Manifest]]:
    """Name, labels and spec of every pod, tests included."""
    for workload in workloads(manifests):
        template = workload["spec"]["template"]
        yield name_of(workload), template["metadata"]["labels"], template["spec"]
    for pod in of_kind(manifests, "Pod"):
        yield name_of(pod), pod["metadata"]["labels"], pod["spec"]


def container(workload: Manifest) -> Manifest:
    """The one container of a workload."""
    [only] = workload["spec"]["template"]["spec"]["containers"]
    return only


def environment(workload: Manifest) -> dict[str, str | None]:
    """Variables of a workload's container; None where the value comes from a Secret."""
    return {entry["name"]: entry.get("value") for entry in container(workload)["env"]}


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return selector.items() <= labels.items()
