"""docs/licences.md has every package that images install, each with a licence that Coppice may be distributed with."""

from __future__ import annotations

import email
import re

import pytest

from scripts.licences import PAGE, licence, names

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
ROWS = dict(re.findall(r"^\| ([a-z0-9-]+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE))


def test_the_table_has_every_package_and_no_other() -> None:
    assert sorted(ROWS) == names(), "make configuration writes docs/licences.md"


def test_each_licence_is_allowed() -> None:
    for name, expression in ROWS.items():
        parts = set(re.split(r" (?:AND|OR|WITH) ", expression.replace("(", "").replace(")", "")))
        assert parts <= ALLOWED, name


def test_a_licence_is_read_from_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    assert licence("grpcio") == ROWS["grpcio"]
    headers = "Metadata-Version: 2.1\nName: x\nClassifier: License :: OSI Approved :: MIT License\n"
    message = email.message_from_string(headers)
    monkeypatch.setattr("importlib.metadata.metadata", lambda _: message)
    assert licence("x") == "MIT"
    message.replace_header("Classifier", "License :: Other/Proprietary License")
    with pytest.raises(KeyError):
        licence("x")
