"""The Dockerfiles: what the last stage has, and that they fit the chart and pyproject.toml. Nothing is built here."""

from __future__ import annotations

import re
import runpy
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "orchestrator": "orchestrator",
    "verifier": "verifier_svc",
    "drafter": "drafter_svc",
    "gateway": "coppice.gateway",
}
WITHOUT_TORCH = ("orchestrator", "gateway")
TEMPLATES = {
    "orchestrator": "orchestrator.yaml",
    "verifier": "verifier.yaml",
    "drafter": "drafters.yaml",
    "gateway": "gateway.yaml",
}
PORTS = {"orchestrator": "50050", "verifier": "50051", "drafter": "50052", "gateway": "8000"}
COMPILER = re.compile(r"\b(gcc|g\+\+|clang|build-essential|cmake)\b")

every_service = pytest.mark.parametrize("service", PACKAGES)


def instructions(service: str) -> list[str]:
    """One instruction a line, without comments."""
    text = re.sub(r"^#.*\n", "", (ROOT / "docker" / f"{service}.Dockerfile").read_text(), flags=re.MULTILINE)
    return [line for line in text.replace("\\\n", " ").splitlines() if line]


def stages(service: str) -> dict[str, list[str]]:
    """Each stage's instructions, behind those of the one that it starts from; that without a name is final."""
    found: dict[str, list[str]] = {}
    name = ""
    for line in instructions(service):
        if match := re.match(r"FROM (\S+)(?: AS (\w+))?$", line):
            name = match[2] or "final"
            found[name] = [*found.get(match[1], [])]
        elif name:
            found[name].append(line)
    return found


def last(lines: list[str], word: str) -> str:
    return [line for line in lines if line.startswith(f"{word} ")][-1].removeprefix(f"{word} ")


@every_service
def test_the_base_has_a_version_and_can_be_pinned_by_digest(service: str) -> None:
    [base] = [line for line in instructions(service) if line.startswith("ARG PYTHON_IMAGE=")]
    assert re.fullmatch(r"ARG PYTHON_IMAGE=python:3\.\d+-slim-\w+", base)
    bases = {line.split()[1] for line in instructions(service) if line.startswith("FROM ")}
    assert bases <= {"${PYTHON_IMAGE}", *stages(service)}


@every_service
def test_an_image_runs_its_service_as_the_user_that_the_chart_names(service: str) -> None:
    for name, lines in stages(service).items():
        if name == "build":
            continue
        user, _, group = last(lines, "USER").partition(":")
        template = (ROOT / "k8s" / "templates" / TEMPLATES[service]).read_text()
        assert f"runAsUser: {user}\n" in template
        assert f"runAsGroup: {group}\n" in template
        assert last(lines, "ENTRYPOINT") == f'["python", "-m", "{PACKAGES[service]}"]'
        assert PORTS[service] in last(lines, "EXPOSE").split()


@every_service
def test_an_image_has_no_compiler_but_for_the_one_that_triton_asks_for(service: str) -> None:
    found = stages(service)
    assert found["final"]
    with_compiler = {name for name, lines in found.items() if any(COMPILER.search(line) for line in lines)}
    assert with_compiler == ({"cuda"} if service == "verifier" else set())
    # Nor pip, which would fetch what is not in the image.
    assert any("venv --without-pip" in line for line in found["build"])
    assert not any("pip" in line for line in found["final"])


@every_service
def test_an_image_has_its_own_service_s_code_and_no_other_s(service: str) -> None:
    copied = {line.split()[1] for line in stages(service)["build"] if line.startswith("COPY ")}
    assert {"coppice", PACKAGES[service].partition(".")[0]} <= copied
    assert not copied & (set(PACKAGES.values()) - {PACKAGES[service]})
    allowed = {line.removeprefix("!") for line in (ROOT / ".dockerignore").read_text().splitlines()}
    from_context = [
        source
        for lines in stages(service).values()
        for line in lines
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    for source in from_context:
        assert source.partition("/")[0] in allowed
        assert (ROOT / source).exists()


def test_the_images_of_back_ends_have_every_bundled_model_between_them() -> None:
    bundled = {path.parent.name for path in (ROOT / "models").glob("*/recipe.json")}
    copied = {
        service: {line.removeprefix("COPY ") for line in stages(service)["final"] if line.startswith("COPY models/")}
        for service in PACKAGES
    }
    assert not copied["orchestrator"]
    assert not copied["gateway"]
    assert not copied["verifier"] & copied["drafter"]
    # By the same names as here: layers alone name the model beside them whose embeddings they use.
    assert copied["verifier"] | copied["drafter"] == {f"models/{name} /models/{name}" for name in bundled}
    # `make images` looks for the same ones in what was built.
    looked_for = runpy.run_path(str(ROOT / "tests" / "chart" / "try_images.py"))["MODELS"]
    assert looked_for == {service: sorted(line.rpartition("/")[2] for line in copied[service]) for service in PACKAGES}


def locked(name: str) -> dict[str, str]:
    """Versions of a lock by package; every one of them has a hash."""
    text = (ROOT / "docker" / "locks" / f"{name}.txt").read_text()
    entries = re.split(r"^(?=[a-z])", text, flags=re.MULTILINE)[1:]
    assert all(re.fullmatch(r"\S+==\S+ \\\n(    --hash=sha256:[0-9a-f]{64}( \\)?\n)+", entry) for entry in entries)
    return dict(re.findall(r"^([a-z0-9-]+)==(\S+)", text, re.MULTILINE))


def asked_for(*extras: str) -> list[Requirement]:
    """What extras ask for, and those that they name, on the images' machines."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = [Requirement(item) for item in project["dependencies"]]
    waiting = [*extras]
    while waiting:
        for item in project["optional-dependencies"][waiting.pop()]:
            requirement = Requirement(item)
            if requirement.name == "coppice":
                waiting += requirement.extras
            else:
                found.append(requirement)
    return [one for one in found if one.marker is None or one.marker.evaluate({"sys_platform": "linux"})]


# scripts/lock.py makes the locks of these.
LOCKED_EXTRAS = {"orchestrator": "redis", "verifier": "parallel", "drafter": "drafter", "gateway": "gateway"}


@every_service
def test_a_lock_has_everything_that_its_image_asks_for_and_no_more_than_versions_and_hashes(service: str) -> None:
    lines = (ROOT / "docker" / "locks" / f"{service}.txt").read_text().splitlines()
    # No index: whoever builds has their own.
    assert not [line for line in lines if re.match(r"-|.*://", line.strip()) and not line.startswith("    --hash=")]
    found = locked(service)
    for requirement in asked_for(LOCKED_EXTRAS[service], "traces"):
        if requirement.name != "torch":
            assert requirement.specifier.contains(found[requirement.name]), requirement
    # Nothing that only torch's CUDA build needs, and of the orchestrator no model library.
    assert not [name for name in found if re.match(r"torch|triton|nvidia-|cuda-", name)]
    if service in WITHOUT_TORCH:
        assert not found.keys() & {"transformers", "numba", "safetensors", "sympy"}


def test_the_tools_that_build_images_are_locked_too() -> None:
    [backend] = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    found = locked("build")
    assert Requirement(backend).specifier.contains(found["setuptools"])
    assert set(found) == {"setuptools", "uv"}


def test_locks_agree_where_they_name_the_same_package() -> None:
    versions: dict[str, set[str]] = {}
    for service in PACKAGES:
        for name, version in locked(service).items():
            versions.setdefault(name, set()).add(version)
    assert not {name for name, found in versions.items() if len(found) > 1}


@every_service
def test_an_image_installs_its_lock_by_hash_and_nothing_else_but_torch(service: str) -> None:
    installs = [
        part.strip()
        for line in stages(service)["build"]
        if line.startswith("RUN ")
        for part in line.removeprefix("RUN ").split("&&")
        if re.search(r"\bpip\b.* install ", part)
    ]
    for files in ("build.txt", f"{service}.txt"):
        [own] = [one for one in installs if one.endswith(f"-r {files}")]
        # Wheels alone: to build something is to run what came with it.
        assert {"--require-hashes", "--no-deps", "--only-binary", ":all:"} <= set(own.split())
        installs.remove(own)
    torch = [one for one in installs if "--torch-backend" in one]
    assert len(torch) == (service not in WITHOUT_TORCH)
    [wheel] = [one for one in installs if one not in torch]
    assert wheel.endswith("--no-deps dist/*.whl")


@pytest.mark.parametrize("service", ["verifier", "drafter"])
def test_an_image_has_a_torch_that_the_project_allows(service: str) -> None:
    [torch] = [one for one in asked_for("model") if one.name == "torch"]
    [version] = [line for line in instructions(service) if line.startswith("ARG TORCH_VERSION=")]
    assert torch.specifier.contains(version.partition("=")[2])
    assert any('"torch==${TORCH_VERSION}"' in line for line in stages(service)["build"])
