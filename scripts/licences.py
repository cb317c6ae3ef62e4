"""Write docs/licences.md: the licence of every package that the images have, and that extras ask for.

Licences are those of the packages installed here. `make configuration` runs it; tests/repo/test_licences.py compares
what is committed with the locks.
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
INTRODUCTION = """# Licences of dependencies

<!-- Written by scripts/licences.py (`make configuration`) from the packages' metadata. -->

Coppice is under Apache-2.0. These are the packages that its images have (`docker/locks/`) and that its extras ask for,
as SPDX expressions by their own metadata; several licences of one package hold for parts of it. All are permissive, or,
as MPL-2.0, ask nothing of code that merely imports them. CUDA builds of torch bring libraries of NVIDIA under
NVIDIA's own terms.

| Package | Licence |
|---|---|
"""


def names() -> list[str]:
    """Every package, by its normalised name."""
    locked = "".join(path.read_text() for path in sorted(LOCKS.glob("*.txt")) if path.stem != "build")
    found = set(re.findall(r"^([\w.-]+)==", locked, re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra, items in project["optional-dependencies"].items():
        if extra not in NOT_SERVED:
            found |= {Requirement(item).name for item in items}
    return sorted(canonicalize_name(name) for name in found - {"coppice"})


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


if __name__ == "__main__":
    PAGE.write_text(INTRODUCTION + "".join(f"| {name} | {licence(name)} |\n" for name in names()))
