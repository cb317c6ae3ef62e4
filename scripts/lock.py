"""Write the locks of the images, `docker/locks/*.txt`: every package with its version and hashes.

Needs uv (docker/locks/build.txt) and a package index; `make lock` has both. Run it to update versions, and review the
difference: the images only install what is in the locks, and torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "docker" / "locks"
# Extra of each image, as in its Dockerfile.
EXTRAS = {"orchestrator": "redis", "verifier": "parallel", "drafter": "drafter", "gateway": "gateway"}
# Extra of all images.
EVERYWHERE = "traces"
PYTHON_VERSION = "3.13"
# Platform of the base image: Debian bookworm, glibc 2.36.
PLATFORM = "x86_64-manylinux_2_36"
# Tools of the images; the build backend is the project's.
UV = "uv==0.13.9"
HEADER = "# Written by scripts/lock.py (`make lock`) on {date}. Wheels of every platform have their hashes here.\n"
# torch's builds for CPUs and CUDA have different wheels of one version, on an index of their own: the Dockerfiles pin
# that version (TORCH_VERSION). Further requirements of its CUDA build are not needed on CPUs.
TORCH_S_OWN = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")


def compiled(requirements: list[str], *options: str) -> str:
    """Lock of requirements given in files or as text."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--generate-hashes", "--no-header"]
    command += ["--no-annotate", "--upgrade", "--python-version", PYTHON_VERSION, "--python-platform", PLATFORM]
    run = subprocess.run(
        [*command, *options],
        cwd=ROOT,
        check=True,
        input="\n".join(requirements),
        stdout=subprocess.PIPE,
        text=True,
    )
    return run.stdout


def without_torch(lock: str) -> str:
    """A lock without torch and the packages that only its CUDA build needs."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not TORCH_S_OWN.match(entry))


def main() -> None:
    """Write all locks."""
    LOCKS.mkdir(exist_ok=True)
    header = HEADER.format(date=datetime.now(UTC).date())
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    (LOCKS / "build.txt").write_text(header + compiled([UV, *backend], "-"))
    for image, extra in EXTRAS.items():
        lock = compiled([], "pyproject.toml", "--extra", extra, "--extra", EVERYWHERE)
        (LOCKS / f"{image}.txt").write_text(header + without_torch(lock))


if __name__ == "__main__":
    main()
