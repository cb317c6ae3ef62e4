"""docs/licences.md has every package that images install, each with its version, its project and an allowed licence."""

from __future__ import annotations

import email
import importlib.metadata
import re
from email.message import Message

import pytest

from scripts.licences import INTRODUCTION, PAGE, licence, project, row, versions

# Permissive; MPL-2.0 is of files, and asks nothing of code that imports them.
ALLOWED = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "MIT",
        "MIT-CMU",
    ),
    *("MIT-CMU", "MPL-2.0", "PSF-2.0", "Python-2.0", "Unlicense", "Zlib", "LLVM-exception"),
}
LINES = PAGE.read_text().removeprefix(INTRODUCTION).splitlines()
ROWS = {name: cells for name, *cells in (line.strip("| ").split(" | ") for line in LINES)}
HEADERS = "Metadata-Version: 2.1\nName: x\nClassifier: License :: OSI Approved :: MIT License\n"


@pytest.fixture
def metadata(monkeypatch: pytest.MonkeyPatch) -> Message:
    """The metadata of every package that is asked for."""
    message = email.message_from_string(HEADERS)
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: message)
    return message


def test_the_table_has_every_package_in_its_version_and_no_other() -> None:
    found = {name: version for name, (version, _, _) in ROWS.items()}
    assert found == versions(), "make configuration writes docs/licences.md"
    assert {"grpcio", "torch", "matplotlib"} <= found.keys()


def test_rows_are_those_of_the_metadata_where_the_same_version_is_installed() -> None:
    installed = {one.name.lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()}
    for line, (name, (version, *_)) in zip(LINES, ROWS.items(), strict=True):
        if installed.get(name, "").partition("+")[0] == version:
            assert line == row(name, version), "make configuration writes docs/licences.md"


def test_each_licence_is_allowed() -> None:
    for name, (_, expression, _) in ROWS.items():
        parts = set(re.split(r" (?:AND|OR|WITH) ", expression.replace("(", "").replace(")", "")))
        assert parts <= ALLOWED, name


def test_each_package_names_its_project_and_no_person() -> None:
    for name, (_, _, address) in ROWS.items():
        assert re.fullmatch(r"\[([\w-]+(\.[\w-]+)+(/[\w.-]+)*)\]\(https://\1\)", address), name


def test_a_licence_is_read_from_the_metadata(metadata: Message) -> None:
    assert licence("x") == "MIT"
    metadata.replace_header("Classifier", "License :: Other/Proprietary License")
    with pytest.raises(KeyError):
        licence("x")


def test_a_project_is_read_from_the_metadata_its_source_before_its_home(metadata: Message) -> None:
    metadata["Author-email"] = "someone@example.com"
    metadata["Project-URL"] = "Documentation, https://x.example.com/"
    with pytest.raises(KeyError):
        project("x")
    metadata["Home-page"] = "http://example.com/x/"
    assert project("x") == "example.com/x"
    metadata["Project-URL"] = "Repository, https://github.com/group/x.git/tree/main/python"
    assert project("x") == "github.com/group/x"
