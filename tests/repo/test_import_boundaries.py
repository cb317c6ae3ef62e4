"""Who may import whom: shared code and the orchestrator stay light, services meet over gRPC only."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = {"drafter_svc", "verifier_svc", "orchestrator"}
MODEL_LIBRARIES = {"torch", "transformers", "safetensors", "accelerate"}
WORKSHOP = {"training", "benchmarks", "conformance", "simulator", "colocated", "tests"}
# The one place in shared code that starts services and recipes, inside the commands that need them.
CLI = "coppice/cli/"


def python_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports_of(path: Path) -> Iterator[tuple[str, int]]:
    """Top-level package and line of every import in a file, at any level of nesting."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name.split(".")[0], node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0], node.lineno


def forbidden_imports(paths: list[Path], forbidden: set[str]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{line} imports {name}"
        for path in paths
        for name, line in imports_of(path)
        if name in forbidden
    ]


def serving_files(service: str) -> list[Path]:
    return [path for path in python_files(service) if "training" not in path.relative_to(ROOT).parts]


def test_shared_code_imports_no_service_no_model_library_and_no_redis() -> None:
    paths = [path for path in python_files("coppice") if not path.relative_to(ROOT).as_posix().startswith(CLI)]
    assert not forbidden_imports(paths, SERVICES | MODEL_LIBRARIES | WORKSHOP | {"redis"})


def test_the_orchestrator_imports_no_model_library() -> None:
    assert not forbidden_imports(python_files("orchestrator"), MODEL_LIBRARIES)


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_services_do_not_import_each_other(service: str) -> None:
    assert not forbidden_imports(python_files(service), SERVICES - {service})


@pytest.mark.parametrize("service", sorted(SERVICES))
def test_serving_code_never_imports_training(service: str) -> None:
    assert not forbidden_imports(serving_files(service), WORKSHOP)
    own = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in serving_files(service)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and ".training" in f".{node.module}."
    ]
    assert not own


@pytest.mark.parametrize("service", sorted(SERVICES - {"orchestrator"}))
def test_only_the_orchestrator_knows_redis(service: str) -> None:
    assert not forbidden_imports(python_files(service), {"redis"})


def test_one_module_alone_knows_opentelemetry() -> None:
    paths = [path for package in ("coppice", *SERVICES) for path in python_files(package)]
    assert {found.split(":")[0] for found in forbidden_imports(paths, {"opentelemetry"})} == {"coppice/obs/otel.py"}


def test_the_conformance_suite_knows_no_service_and_no_model_library_but_for_its_reference() -> None:
    reference = ROOT / "conformance" / "reference.py"
    paths = [path for path in python_files("conformance") if path != reference]
    assert not forbidden_imports(paths, SERVICES | MODEL_LIBRARIES | (WORKSHOP - {"conformance"}))
    assert not forbidden_imports([reference], SERVICES)


def test_the_simulator_knows_what_decides_on_time_and_nothing_that_computes() -> None:
    paths = python_files("simulator")
    assert not forbidden_imports(paths, MODEL_LIBRARIES | {"drafter_svc"} | (WORKSHOP - {"simulator"}))


def test_the_command_line_imports_heavy_things_inside_commands_only() -> None:
    heavy = SERVICES | MODEL_LIBRARIES | WORKSHOP
    top_level = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in python_files(CLI)
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        if name.split(".")[0] in heavy
    ]
    assert not top_level


BLOCKED_IMPORT = """
import importlib, pkgutil, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "transformers", "safetensors", "redis", "opentelemetry"}:
            raise ImportError(f"{name} is not in the orchestrator's image")
        return None

sys.meta_path.insert(0, Blocker())
for package_name in sys.argv[1:]:
    package = importlib.import_module(package_name)
    for module in pkgutil.walk_packages(package.__path__, package_name + "."):
        if not module.name.endswith(("__main__", "coppice.obs.otel")):
            importlib.import_module(module.name)
import coppice.cli.__main__
"""


def test_the_orchestrator_and_the_command_line_load_where_there_is_no_torch_no_redis_and_no_tracing() -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKED_IMPORT, "coppice", "orchestrator", "conformance", "simulator"],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
