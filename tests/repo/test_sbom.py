"""Bills of materials of the images have what the images install, and statements of provenance name their sources."""

from __future__ import annotations

import hashlib
import json
import re
import runpy
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from scripts import sbom

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ("drafter", "gateway", "orchestrator", "verifier")
# `make test` installs it.
TOOL = Path(sys.prefix) / "cyclonedx-bom" / sbom.VERSION / "bin" / "cyclonedx-py"


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


@pytest.mark.skipif(not TOOL.exists(), reason="pip could not fetch cyclonedx-bom, or `make test` has not tried")
def test_it_lists_every_package_with_version_and_hashes(tmp_path: Path) -> None:
    told = json.loads(sbom.write(TOOL, "verifier", tmp_path).read_text())
    assert (told["bomFormat"], told["metadata"]["component"]["name"]) == ("CycloneDX", "coppice")
    locked = dict(re.findall(r"^([\w.-]+)==([\w.+]+)", sbom.requirements("verifier"), re.MULTILINE))
    assert {one["name"]: one["version"] for one in told["components"]} == locked
    for one in told["components"]:
        hashes = [part for reference in one.get("externalReferences", ()) for part in reference.get("hashes", ())]
        # Of torch's builds none is pinned.
        assert bool(hashes) == (one["name"] != "torch"), one["name"]


def engine_of(tmp_path: Path, tool: dict[str, Any], image_id: str, repo_digests: list[str]) -> Any:
    """An engine that says this of every image."""
    command = tmp_path / "engine"
    command.write_text(f"""#!/bin/sh
case "$*" in *RepoDigests*) echo '{json.dumps(repo_digests)}';; *) echo sha256:{image_id};; esac
""")
    command.chmod(0o755)
    return tool["Engine"]((str(command),), "try")


@pytest.fixture
def tool(tmp_path: Path) -> dict[str, Any]:
    """The script that builds images, which writes provenance to a temporary directory."""
    names = runpy.run_path(str(ROOT / "tests" / "chart" / "try_images.py"))
    names["write_provenance"].__globals__["PROVENANCE"] = tmp_path
    return names


@pytest.mark.parametrize("image", IMAGES)
def test_provenance_names_image_base_commit_and_locks(image: str, tool: dict[str, Any], tmp_path: Path) -> None:
    options = ["--build-arg", "PYTHON_IMAGE=python:3.13@sha256:abc"]
    assert re.fullmatch(r"python:3\.\d+-slim-\w+", tool["base_image"](image, []))
    assert tool["base_image"](image, options) == "python:3.13@sha256:abc"
    engine = engine_of(tmp_path, tool, "1" * 64, ["registry.example.com/python@sha256:" + "2" * 64])
    tool["write_provenance"](engine, image, options, datetime.now(UTC))
    told = json.loads((tmp_path / f"{image}.provenance.json").read_text())
    manifest = {"digest": {"sha256": "2" * 64}, "annotations": {"digest_of": "manifest"}}
    assert told["subject"] == [{"name": f"coppice/{image}:try", **manifest}]
    sources = {one["uri"]: one["digest"] for one in told["predicate"]["buildDefinition"]["resolvedDependencies"]}
    assert sources["oci:python:3.13@sha256:abc"] == manifest["digest"]
    lock = (ROOT / "docker" / "locks" / f"{image}.txt").read_bytes()
    assert sources[f"file:docker/locks/{image}.txt"] == {"sha256": hashlib.sha256(lock).hexdigest()}
    if commit := tool["git"]("rev-parse", "HEAD"):
        assert sources["git"] == {"gitCommit": commit}


@pytest.mark.parametrize("digests", [[], ["localhost/coppice/gateway@sha256:" + "3" * 64]])
def test_provenance_of_an_image_that_was_not_pushed_has_its_id_until_it_is(
    tool: dict[str, Any], tmp_path: Path, digests: list[str]
) -> None:
    path = tmp_path / "gateway.provenance.json"
    tool["write_provenance"](engine_of(tmp_path, tool, "1" * 64, digests), "gateway", [], datetime.now(UTC))
    built = json.loads(path.read_text())
    by_id = {"digest": {"sha256": "1" * 64}, "annotations": {"digest_of": "image id"}}
    assert built["subject"] == [{"name": "coppice/gateway:try", **by_id}]
    pushed = [*digests, "registry.example.com/coppice/gateway@sha256:" + "2" * 64]
    tool["renew_provenance"](engine_of(tmp_path, tool, "1" * 64, pushed), "gateway")
    told = json.loads(path.read_text())
    assert told["subject"][0]["digest"] == {"sha256": "2" * 64}
    assert told["predicate"] == built["predicate"]


def test_no_provenance_is_written_of_an_image_that_was_built_elsewhere(
    tool: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool["renew_provenance"](engine_of(tmp_path, tool, "1" * 64, []), "gateway")
    assert not list(tmp_path.glob("*.json"))
    tool["write_provenance"](engine_of(tmp_path, tool, "1" * 64, []), "gateway", [], datetime.now(UTC))
    before = (tmp_path / "gateway.provenance.json").read_text()
    tool["renew_provenance"](engine_of(tmp_path, tool, "4" * 64, []), "gateway")
    assert (tmp_path / "gateway.provenance.json").read_text() == before
    assert capsys.readouterr().out.count("gateway: no provenance") == 2
