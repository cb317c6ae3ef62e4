"""`python -m tests.chart.upgrades [COMMIT]`: what `helm upgrade` from the chart of an earlier commit would change.

Renders both charts with the same values, those of the earlier commit's profiles and of EAGLE: what is refused by
Kubernetes because it can never change, what goes away, what comes, and whose pods are started again.
"""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.chart.rendering import CHART, NAMESPACE, RELEASE, ROOT, Manifest, helm, name_of

# The chart that installations have, which upgrades are looked at from.
BASE = "e5a3ac33"
PROFILES = ("values.yaml", "values-cpu.yaml", "values-gpu.yaml", "values-tls.yaml", "values-keda.yaml")
# No profile of that commit has a drafter of this kind.
EAGLE = {"drafters": [{"name": "eagle", "kind": "eagle", "config": {"MODEL": "/weights/eagle"}}]}
# Fields that Kubernetes refuses to change, by kind.
FIXED = {
    "Deployment": ("selector",),
    "StatefulSet": ("selector", "serviceName", "podManagementPolicy", "volumeClaimTemplates"),
    "Service": ("clusterIP",),
}
PODS = ("Deployment", "StatefulSet")
Key = tuple[str, str]


@dataclass
class Differences:
    """Of one profile, in words."""

    refused: list[str] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)


def earlier_chart(commit: str, directory: Path) -> Path:
    """The chart of a commit, in a directory. Raises CalledProcessError where there is no such commit."""
    archive = subprocess.run(
        ["git", "-C", str(ROOT), "archive", commit, "k8s"], capture_output=True, check=True, timeout=60
    )
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="data")
    return directory / "k8s"


def installed(chart: Path, values: dict[str, Any]) -> dict[Key, Manifest]:
    """What a release of a chart consists of, without hooks. Raises HelmError if it refuses the values."""
    with helm.Chart.load(chart) as loaded:
        files = loaded.render(values, name=RELEASE, namespace=NAMESPACE)
    manifests = [
        manifest
        for name, text in files.items()
        if name.endswith(".yaml")
        for manifest in yaml.safe_load_all(text)
        if manifest is not None
    ]
    return {
        (one["kind"], name_of(one)): one
        for one in manifests
        if "helm.sh/hook" not in one["metadata"].get("annotations", {})
    }


def differences(before: dict[Key, Manifest], after: dict[Key, Manifest]) -> Differences:
    """What an upgrade from one to the other changes."""
    found = Differences(
        gone=[" ".join(key) for key in before if key not in after],
        new=[" ".join(key) for key in after if key not in before],
    )
    for key, old in before.items():
        if (new := after.get(key)) is None:
            continue
        for name in FIXED.get(old["kind"], ()):
            if old["spec"].get(name) != new["spec"].get(name):
                found.refused.append(f"{' '.join(key)}: {name}")
        if old["kind"] in PODS and old["spec"]["template"] != new["spec"]["template"]:
            found.restarted.append(
                f"{' '.join(key)}: {', '.join(changed(old['spec']['template'], new['spec']['template']))}"
            )
    return found


def changed(old: Any, new: Any, path: str = "") -> Iterator[str]:
    """Paths at which two manifests differ; entries of lists that have a name go by it."""
    are_lists = isinstance(old, list) and isinstance(new, list)
    if are_lists and all(isinstance(one, dict) and "name" in one for one in (*old, *new)):
        old, new = ({one["name"]: one for one in every} for every in (old, new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield path
        return
    for key in dict.fromkeys((*old, *new)):
        if key not in old or key not in new:
            yield f"{path}/{key} ({'gone' if key in old else 'new'})"
        else:
            yield from changed(old[key], new[key], f"{path}/{key}")


def from_to(chart: Path, values: dict[str, Any]) -> Differences:
    """What an upgrade from another chart changes. Helm keeps values that were given, takes the rest from the new."""
    return differences(installed(chart, values), installed(CHART, values))


def upgrade(commit: str = BASE) -> dict[str, Differences]:
    """Differences by profile of the earlier commit, which an installation brings its values from."""
    found = {}
    with tempfile.TemporaryDirectory() as directory:
        chart = earlier_chart(commit, Path(directory))
        for profile in PROFILES:
            values = {} if profile == "values.yaml" else yaml.safe_load((chart / profile).read_text())
            found[profile] = from_to(chart, values)
        found["eagle"] = from_to(chart, EAGLE)
    return found


def main() -> None:
    """Print them; exit code 1 where an upgrade would be refused."""
    found = upgrade(*sys.argv[1:2])
    for profile, one in found.items():
        sys.stdout.write(f"{profile}\n")
        for name, lines in vars(one).items():
            sys.stdout.write("".join(f"  {name}: {line}\n" for line in lines))
    sys.exit(any(one.refused for one in found.values()))


if __name__ == "__main__":
    main()
