"""Bills of materials of the images have what the images install, and statements of provenance name their sources."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
from datetime import UTC, datetime
from pathlib import Path

import pytest

from scripts import sbom

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("drafter", "gateway", "orchestrator", "verifier")
TOOL = ROOT / ".venv" / "cyclonedx-bom" / sbom.VERSION / "bin" / "cyclonedx-py"


def test_there_is_one_for_every_image() -> None:
    assert sbom.images() == list(IMAGES)


@pytest.mark.parametrize("image", IMAGES)
def test_it_is_made_of_the_lock_and_of_torch_where_the_image_has_it(image: str) -> None:
    text = sbom.requirements(image)
    assert text.startswith((ROOT / "docker" / "locks" / f"{image}.txt").read_text())
    dockerfile = (ROOT / "docker" / f"{image}.Dockerfile").read_text()
    installed = re.findall(r"TORCH_VERSION=(.+)", dockerfile)
    assert re.findall(r"^torch==(.+)$", text, re.MULTILINE) == installed
    assert bool(installed) == (image in ("drafter", "verifier"))


@pytest.mark.skipif(not TOOL.exists(), reason="`make sbom` has not installed cyclonedx-bom here")
def test_it_lists_every_package_with_version_and_hashes(tmp_path: Path) -> None:
    told = json.loads(sbom.write(TOOL, "verifier", tmp_path).read_text())
    assert (told["bomFormat"], told["metadata"]["component"]["name"]) == ("CycloneDX", "coppice")
    locked = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", sbom.requirements("verifier"), re.MULTILINE))
    assert {one["name"]: one["version"] for one in told["components"]} == locked
    for one in told["components"]:
        hashes = [part for reference in one.get("externalReferences", ()) for part in reference.get("hashes", ())]
        # Of torch's builds none is pinned.
        assert bool(hashes) == (one["name"] != "torch"), one["name"]


@pytest.mark.parametrize("image", IMAGES)
def test_provenance_names_image_base_commit_and_locks(image: str) -> None:
    tool = runpy.run_path(str(ROOT / "tests" / "chart" / "try_images.py"))
    options = ["--build-arg", "PYTHON_IMAGE=python:3.13@sha256:abc"]
    base = tool["base_image"](image, [])
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", base)
    assert tool["base_image"](image, options) == "python:3.13@sha256:abc"
    digests = {f"coppice/{image}:try": "1" * 64, base: "2" * 64}
    told = tool["provenance"](image, f"coppice/{image}:try", digests, options, datetime.now(UTC))
    assert told["subject"] == [{"name": f"coppice/{image}:try", "digest": {"sha256": "1" * 64}}]
    sources = {one["uri"]: one["digest"] for one in told["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert sources[f"oci:{base}"] == {"sha256": "2" * 64}
    lock = (ROOT / "docker" / "locks" / f"{image}.txt").read_bytes()
    assert sources[f"file:docker/locks/{image}.txt"] == {"sha256": hashlib.sha256(lock).hexdigest()}
    if commit := tool["git"]("rev-parse", "HEAD"):
        assert sources["git"] == {"gitCommit": commit}
