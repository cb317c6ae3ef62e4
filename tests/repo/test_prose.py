"""Words that documents avoid in favour of terms of the field, and docstrings that begin with a clause."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("coppice", "orchestrator", "verifier_svc", "drafter_svc")
# A docstring that begins with one of these is a clause in place of a noun. "Whether" suits values that are booleans.
CLAUSES = {"What", "How", "Which", "Where", "When", "Who", "Whose", "Why", "Those", "That"}
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
# The lab and the command line: only their modules.
MODULES_ONLY = ("coppice/lab/", "coppice/cli/")
WORDS = (
    "nobody",
    "anybody",
    "somebody",
    "everybody",
    "whoever",
    "of late",
    "anew",
    "ever so",
    "in vain",
    "beside",
    "whosever",
)
AVOIDED = re.compile(rf"\b({'|'.join(WORDS)})\b|\bbehind (?!a gateway)", re.I)
# Written by commands, or with tables of messages.
GENERATED = {"results", "configuration.md", "checkpoints.md", "mistakes.md", "licences.md"}
PAGES = [path for path in sorted((ROOT / "docs").rglob("*.md")) if not GENERATED & set(path.relative_to(ROOT).parts)]
DOCUMENTS = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", *(path.relative_to(ROOT).as_posix() for path in PAGES)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_avoids_them(document: str) -> None:
    lines = (ROOT / document).read_text().splitlines()
    found = [f"{document}:{number}: {line}" for number, line in enumerate(lines, 1) if AVOIDED.search(line)]
    assert not found


@pytest.mark.parametrize("page", [page.name for page in PAGES if page.parent.name == "algorithms"])
def test_a_page_of_an_algorithm_says_where_it_comes_from_where_it_is_and_what_it_gains(page: str) -> None:
    text = (ROOT / "docs" / "algorithms" / page).read_text()
    if page == "index.md":
        others = {path.name for path in PAGES if path.parent.name == "algorithms"} - {page}
        assert all(f"({other})" in text for other in others)
        return
    assert re.findall(r"^\| (source|files|default|status) \|", text, re.M) == ["source", "files", "default", "status"]
    assert "## What it gains" in text or "## What it costs" in text


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py") if "v1" not in path.parts]
    assert len(files) > 300
    found = []
    for path in files:
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        nodes = [tree] if name.startswith(MODULES_ONLY) else ast.walk(tree)
        for node in nodes:
            docstring = ast.get_docstring(node) if isinstance(node, DOCUMENTED) else None
            first = (docstring or "").split(maxsplit=1)[:1]
            if first and first[0].strip(",:;") in (CLAUSES | {"Whether"} if node is tree else CLAUSES):
                found.append(f"{name}: {docstring}")
    assert not found
