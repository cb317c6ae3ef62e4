"""The sdist and the wheel: built from the tree, installed alone, and tried outside the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from coppice.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.timeout(300)
PACKAGES = ("coppice", "orchestrator", "verifier_svc", "drafter_svc")
BUILD = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with an sdist and a wheel."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, source / file)
    for what in ("build_sdist", "build_wheel"):
        done = run(sys.executable, "-W", "ignore", "-c", BUILD, what, str(out), cwd=source)
        assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the wheel's files; libraries are those of the environment that runs the test."""
    (wheel,) = built.glob("*.whl")
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(wheel), cwd=built)
    return target


def run(*command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "COLUMNS": "200", **env}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280, check=False)
    return done


@pytest.fixture
def python(installed: Path, tmp_path: Path) -> list[str]:
    """A Python in an empty directory whose packages of ours are the wheel's."""
    return ["env", "-C", str(tmp_path), f"PYTHONPATH={installed}", sys.executable]


def test_the_wheel_has_four_names_and_their_types(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if path.is_dir() and "." not in path.name}
    assert names - {"bin"} == set(PACKAGES)
    assert all((installed / name / "py.typed").is_file() for name in PACKAGES)
    assert (installed / "coppice" / "v1" / "inference_pb2.pyi").is_file()


def test_the_wheel_has_the_gateway_s_page(installed: Path) -> None:
    page = Path("coppice", "gateway", "page")
    files = {path.name for path in (ROOT / page).iterdir()}
    assert "index.html" in files
    assert {path.name for path in (installed / page).iterdir()} == files


def test_the_sdist_has_what_the_wheel_is_built_from(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE"} <= names
    assert {f"{package}/__init__.py" for package in PACKAGES} <= names


def test_the_command_says_its_version(python: list[str], installed: Path, tmp_path: Path) -> None:
    where = run(*python, "-c", "import coppice; print(coppice.__file__)", cwd=tmp_path)
    assert where.stdout.startswith(str(installed))
    assert run(*python, "-m", "coppice.cli", "--version", cwd=tmp_path).stdout == f"coppice {VERSION}\n"


# `demo` has a model of its own where that is installed.
@pytest.mark.parametrize("command", ["up", "generate --prompt x"])
def test_it_says_where_the_bundled_models_are(python: list[str], tmp_path: Path, command: str) -> None:
    done = run(*python, "-m", "coppice.cli", *command.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert "there is no bundled model at" in done.stderr
    assert "set COPPICE_MODELS" in done.stderr


# Kernels are compiled anew for the directory that it is installed in.
@pytest.mark.timeout(400)
def test_it_completes_a_prompt_with_a_model_that_is_named(python: list[str], tmp_path: Path) -> None:
    target = str(ROOT / "models" / "target")
    arguments = ("--target", target, "--drafter", "none", "--prompt", "def ", "--max-tokens", "4", "--json")
    done = run(*python, "-m", "coppice.cli", "generate", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert '"text"' in done.stdout
