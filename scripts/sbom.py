"""Write a CycloneDX bill of materials (JSON) for each image from its lock: `python scripts/sbom.py VENV [DIRECTORY]`.

cyclonedx-bom writes and validates it, from an environment of its own in VENV. Where that cannot be had, it says so.
`make sbom` runs it, and so does `make images`; with `--install` in place of a directory, as in `make test`, it writes
nothing.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build" / "sbom"
VERSION = "7.5.0"
_TORCH = re.compile(r"^ARG TORCH_VERSION=(\S+)$", re.MULTILINE)


def images() -> list[str]:
    """Names of all images."""
    return sorted(path.name.removesuffix(".Dockerfile") for path in (ROOT / "docker").glob("*.Dockerfile"))


def requirements(image: str) -> str:
    """Every package of an image with its version: those of its lock, and torch, which has an index of its own."""
    lock = (ROOT / "docker" / "locks" / f"{image}.txt").read_text()
    torch = _TORCH.search((ROOT / "docker" / f"{image}.Dockerfile").read_text())
    return lock + (f"torch=={torch[1]}\n" if torch else "")


def generator(venv: Path) -> Path | None:
    """The command of cyclonedx-bom, installed if need be; None where pip cannot fetch it."""
    directory = venv / "cyclonedx-bom" / VERSION
    command = directory / "bin" / "cyclonedx-py"
    if not command.exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(directory)], check=True)
        pip = [str(directory / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", "install", "-qq"]
        if subprocess.run([*pip, f"cyclonedx-bom=={VERSION}"], check=False).returncode:
            return None
    return command


def write(command: Path, image: str, out: Path) -> Path:
    """Write an image's bill of materials into a directory. Raises CalledProcessError if it is not valid."""
    path = out / f"{image}.cdx.json"
    out.mkdir(parents=True, exist_ok=True)
    options = [
        "--pyproject",
        "pyproject.toml",
        "--output-reproducible",
        "--of",
        "JSON",
        "--validate",
        "-o",
        str(path),
        "-",
    ]
    # A lock has no graph of dependencies, of which the library warns.
    env = {**os.environ, "PYTHONWARNINGS": "ignore"}
    run = [str(command), "requirements", *options]
    subprocess.run(run, cwd=ROOT, check=True, input=requirements(image), text=True, env=env)
    return path


def main(venv: str, out: str = str(OUT)) -> None:
    """Install cyclonedx-bom, and write all."""
    command = generator(Path(venv))
    if command is None:
        sys.stdout.write("sbom: pip could not fetch cyclonedx-bom, so bills of materials are SKIPPED\n")
        return
    for image in images() if out != "--install" else ():
        sys.stdout.write(f"sbom: {write(command, image, Path(out).resolve())}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
