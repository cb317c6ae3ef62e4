"""Write docs/licences.md: version, licence and project of every package that the images have or extras ask for.

Versions are the locks', licences and projects those of the packages installed here. `make configuration` runs it;
tests/repo/test_licences.py compares what is committed with the locks and with the packages.
"""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "licences.md"
LOCKS = ROOT / "docker" / "locks"
# Tools of developers and of builds, and large packages of single tests: not distributed, and not always here.
NOT_SERVED = {"dev", "docs", "chart", "llamacpp", "triton"}
# Of packages whose metadata has no SPDX expression: their classifier, or the text of the field.
SPDX = {
    "OSI Approved :: Apache Software License": "Apache-2.0",
    "OSI Approved :: BSD License": "BSD-3-Clause",
    "OSI Approved :: MIT License": "MIT",
    "OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)": "MPL-2.0",
    "OSI Approved :: Python Software Foundation License": "PSF-2.0",
    "3-Clause BSD License": "BSD-3-Clause",
    "Apache 2.0": "Apache-2.0",
    "Apache 2.0 License": "Apache-2.0",
    "Apache-2.0": "Apache-2.0",
    "Apache License 2.0": "Apache-2.0",
    "BSD": "BSD-3-Clause",
    "BSD-3-Clause": "BSD-3-Clause",
    "ISC License": "ISC",
    "MIT": "MIT",
    "MIT License": "MIT",
    "MPL-2.0 AND MIT": "MPL-2.0 AND MIT",
}
# Labels of a project's addresses in metadata: its source code before its home page.
PROJECT_LABELS = ("source", "source code", "repository", "code", "github", "homepage", "home")
_TORCH = re.compile(r"^ARG TORCH_VERSION=(\S+)$", re.MULTILINE)
INTRODUCTION = """# Dependencies and their licences

<!-- Written by scripts/licences.py (`make configuration`) from the locks and the packages' metadata. -->

Coppice is under Apache-2.0. These are the packages that its images have (`docker/locks/`) and that its extras ask for,
direct and transitive. Licences are SPDX expressions by the packages' own metadata; several licences of one package hold
for parts of it. All are permissive, or, as MPL-2.0, ask nothing of code that merely imports them. CUDA builds of torch
bring libraries of NVIDIA under NVIDIA's own terms.

A version is that of the images, or, where only an extra asks for the package, the range that it allows. The project is
who maintains the package, by the address of its source code, or else of its home page. What shows that a project is
still maintained, and what does not: [security](security.md#dependencies).

| Package | Version | Licence | Project |
|---|---|---|---|
"""


def versions() -> dict[str, str]:
    """Every package by its normalised name, with the version of the images, or else the range of an extra."""
    found: dict[str, str] = {}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, items in project["optional-dependencies"].items():
        if extra not in NOT_SERVED:
            found |= {one.name: str(one.specifier) for one in map(Requirement, items) if one.name != "coppice"}
    for path in sorted(LOCKS.glob("*.txt")):
        if path.stem != "build":
            found |= dict(re.findall(r"^([\w.-]+)==(\S+)", path.read_text(), re.MULTILINE))
            pinned = _TORCH.search((ROOT / "docker" / f"{path.stem}.Dockerfile").read_text())
            found |= {"torch": pinned[1]} if pinned else {}
    return dict(sorted((canonicalize_name(name), version) for name, version in found.items()))


def licence(name: str) -> str:
    """The licence of an installed package as an SPDX expression.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
        KeyError: its metadata says nothing known.
    """
    metadata: Any = importlib.metadata.metadata(name)
    if expression := metadata.get("License-Expression"):
        return str(expression)
    classifiers = [one.removeprefix("License :: ") for one in metadata.get_all("Classifier") or ()]
    known = sorted({SPDX[one] for one in classifiers if one in SPDX})
    return " OR ".join(known) if known else SPDX[(metadata.get("License") or "").strip()]


def project(name: str) -> str:
    """The address of an installed package's project, without scheme; of GitHub's, the repository.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
        KeyError: its metadata names no project.
    """
    metadata: Any = importlib.metadata.metadata(name)
    labelled = [one.split(", ", 1) for one in metadata.get_all("Project-URL") or ()]
    addresses = {label.lower(): address for label, address in labelled} | {"": metadata.get("Home-page") or ""}
    for label in (*PROJECT_LABELS, ""):
        if address := re.fullmatch(r"https?://(\S+?)/?", addresses.get(label, "")):
            at_github = re.match(r"github\.com/[^/]+/[^/]+", address[1])
            return at_github[0].removesuffix(".git") if at_github else address[1]
    raise KeyError(name)


def row(name: str, version: str) -> str:
    """A package's row of the table."""
    return f"| {name} | {version} | {licence(name)} | [{project(name)}](https://{project(name)}) |"


if __name__ == "__main__":
    PAGE.write_text(INTRODUCTION + "".join(f"{row(name, version)}\n" for name, version in versions().items()))
