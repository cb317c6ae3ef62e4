"""The Dockerfiles: what the last stage has, and that they fit the chart and pyproject.toml. Nothing is built here."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {"orchestrator": "orchestrator", "verifier": "verifier_svc", "drafter": "drafter_svc"}
TEMPLATES = {"orchestrator": "orchestrator.yaml", "verifier": "verifier.yaml", "drafter": "drafters.yaml"}
PORTS = {"orchestrator": "50050", "verifier": "50051", "drafter": "50052"}
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
    assert {"coppice", PACKAGES[service]} <= copied
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


@pytest.mark.parametrize("service", ["verifier", "drafter"])
def test_an_image_has_the_torch_that_the_project_asks_for(service: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [torch] = [item for item in extras["model"] if item.startswith("torch")]
    assert any(f'"{torch}"' in line for line in stages(service)["build"])


@every_service
def test_an_image_installs_extras_that_exist(service: str) -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [named] = [names.split(",") for line in stages(service)["build"] for names in re.findall(r'"\.\[(.+)\]"', line)]
    assert set(named) <= extras.keys()
    assert "traces" in named
    if service == "orchestrator":
        assert not any(item.startswith(("torch", "coppice")) for name in named for item in extras[name])
