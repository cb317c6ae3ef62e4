"""A class name has one meaning in the product's code; benchmarks, simulator and conformance suite are apart."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("coppice", "orchestrator", "verifier_svc", "drafter_svc")
# Generated from the protos, or measuring the product.
APART = ("coppice/v1", "coppice/lab", "coppice/cli/bench")


def class_names(sources: dict[str, str]) -> dict[str, list[str]]:
    """Names of classes that are defined more than once, and the files that define them."""
    found = defaultdict(list)
    for path, text in sources.items():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_name_defined_twice_is_found() -> None:
    sources = {"a.py": "class Load: ...", "b.py": "class Load: ...\nclass Other: ..."}
    assert class_names(sources) == {"Load": ["a.py", "b.py"]}


def test_no_class_name_of_the_product_is_defined_twice() -> None:
    sources = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(APART):
                sources[name] = path.read_text()
    assert len(sources) > 200
    assert class_names(sources) == {}
