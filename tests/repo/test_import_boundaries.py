"""When modules are imported, and where: the import contracts in pyproject.toml say who may import whom."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HEAVY = {"drafter_svc", "verifier_svc", "orchestrator", "torch", "transformers", "safetensors", "accelerate"}
HEAVY_ROOMS = ("coppice.lab", "coppice.training", "coppice.colocated")


def is_heavy(module: str) -> bool:
    return module.split(".")[0] in HEAVY or module.startswith(HEAVY_ROOMS)


def test_the_command_line_imports_heavy_things_inside_commands_only() -> None:
    top_level = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in sorted((ROOT / "coppice" / "cli").rglob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
        if is_heavy(name)
    ]
    assert not top_level


BLOCKED_IMPORT = """
import importlib, pkgutil, sys

BLOCKED = "torch", "transformers", "safetensors", "redis", "opentelemetry.sdk", "opentelemetry.exporter"

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.startswith(BLOCKED):
            raise ImportError(f"{name} is not in the orchestrator's image")
        return None

MODEL_ROOMS = (
    "coppice.adapt", "coppice.lab.bench", "coppice.training", "coppice.colocated", "coppice.draft_models",
    "coppice.kernels.cpu.packed_linear", "coppice.lean_torch",
)
sys.meta_path.insert(0, Blocker())
for package_name in sys.argv[1:]:
    package = importlib.import_module(package_name)
    for module in pkgutil.walk_packages(package.__path__, package_name + "."):
        if not module.name.endswith("__main__") and not module.name.startswith(MODEL_ROOMS):
            importlib.import_module(module.name)
import coppice.cli.__main__
"""


def test_the_orchestrator_and_the_command_line_load_where_there_is_no_torch_no_redis_and_no_exporter() -> None:
    subprocess.run(
        [sys.executable, "-W", "error", "-c", BLOCKED_IMPORT, "coppice", "orchestrator"],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=60,
    )
