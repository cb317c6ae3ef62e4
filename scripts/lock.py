"""Write the locks of the images, `docker/locks/*.txt`: every package with its version and hashes.

Needs uv, as in docker/locks/build.txt, and a package index; `make lock` has both. Run it for newer versions, and look
at the difference: the images install what is in the locks, and nothing else but torch.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / "docker" / "locks"
# What each image installs beside the project's own dependencies, as its Dockerfile does.
EXTRAS = {"orchestrator": "redis", "verifier": "parallel", "drafter": "drafter"}
# And what all of them do.
EVERYWHERE = "traces"
PYTHON_VERSION = "3.13"
# That of the base image: Debian bookworm, glibc 2.36.
PLATFORM = "x86_64-manylinux_2_36"
# Of the image's own tools; the build backend is the project's.
UV = "uv==0.13.8"
HEADER = "# Written by scripts/lock.py (`make lock`). Wheels of every platform have their hashes here.\n"
# The builds of torch for CPUs and for CUDA have other wheels under one version, from an index that is torch's own: that
# version is pinned in the Dockerfiles (TORCH_VERSION). What else its CUDA build brings is no part of the one for CPUs.
TORCH_S_OWN = re.compile(r"(torch|triton|nvidia-[\w-]+|cuda-[\w-]+)==")


def compiled(requirements: list[str], *options: str) -> str:
    """What a resolver makes of requirements, which stand in files or are given as text."""
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
    """A lock without torch and what its CUDA build alone needs."""
    entries = re.split(r"^(?=\S)", lock, flags=re.MULTILINE)
    return "".join(entry for entry in entries if not TORCH_S_OWN.match(entry))


def main() -> None:
    """Write all of them."""
    LOCKS.mkdir(exist_ok=True)
    backend = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
    (LOCKS / "build.txt").write_text(HEADER + compiled([UV, *backend], "-"))
    for image, extra in EXTRAS.items():
        lock = compiled([], "pyproject.toml", "--extra", extra, "--extra", EVERYWHERE)
        (LOCKS / f"{image}.txt").write_text(HEADER + without_torch(lock))


if __name__ == "__main__":
    main()
