"""Create `.venv` and install everything into it; does nothing if nothing has changed. Standard library only.

Environment:
    TORCH_INDEX            take torch from this package index instead of letting pip and uv decide
    SYSTEM_SITE_PACKAGES   1 lets the environment see the packages of the Python that creates it (for machines
                           that bring their own torch and have no network)
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
OLDEST_PYTHON = (3, 11)
# The range of the `model` extra in pyproject.toml; tests/repo checks that they agree.
TORCH = "torch>=2.11,<2.14"
EXTRAS = "dev"
# For tests only, and too large for other users (--tests).
TEST_EXTRAS = "dev,triton,chart"

CUDA_TORCH = """\
pip would fetch torch with gigabytes of CUDA libraries here, and this machine has no NVIDIA GPU.
Taking the CPU build through uv failed too. Give its index yourself, as the 'get started' page of pytorch.org
shows it for Linux, pip, Python, CPU:

    make setup TORCH_INDEX=<the address after --index-url>
"""


def fail(message: str) -> NoReturn:
    """Stop with a message."""
    raise SystemExit(f"setup: {message}")


def say(message: str) -> None:
    """Print a message, unbuffered."""
    sys.stdout.write(f"setup: {message}\n")
    sys.stdout.flush()


class Venv:
    """The virtual environment."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        scripts = "Scripts" if os.name == "nt" else "bin"
        self.python = directory / scripts / "python"
        self._stamp = directory / ".coppice-setup"

    def is_current(self, key: str, extras: str = EXTRAS) -> bool:
        """Whether an earlier run finished with the same inputs, and at least these extras."""
        done = self._stamp.read_text().split() if self._stamp.is_file() else []
        return done[:1] == [key] and set(extras.split(",")) <= set(done[1].split(",")) and self._works()

    def finish(self, key: str, extras: str = EXTRAS) -> None:
        """Record a finished installation."""
        self._stamp.write_text(f"{key} {extras}")

    def create(self) -> None:
        """Create the environment, unless a working one exists."""
        self._stamp.unlink(missing_ok=True)
        if self._works():
            return
        if importlib.util.find_spec("ensurepip") is None:
            version = f"{sys.version_info.major}.{sys.version_info.minor}"
            fail(
                f"this Python's venv module comes without pip; install it (Debian, Ubuntu: apt-get install "
                f"python{version}-venv) or name another Python: make setup PYTHON=python3.12"
            )
        say(f"creating {self.directory} with Python {sys.version.split()[0]}")
        options = ["--clear"] if self.directory.exists() else []
        if wants_system_packages():
            options.append("--system-site-packages")
        run([sys.executable, "-m", "venv", *options, str(self.directory)])
        if wants_system_packages() and sys.prefix != sys.base_prefix:
            self._share_packages_of_this_venv()

    def pip(self, *arguments: str) -> None:
        """Run pip quietly."""
        run([str(self.python), "-m", "pip", "--disable-pip-version-check", *arguments])

    def planned(self, *requirements: str) -> dict[str, str]:
        """Names and versions that pip would install; only metadata is downloaded.

        Raises:
            subprocess.CalledProcessError: pip finds no solution.
        """
        report = ["--dry-run", "-qq", "--report", "-"]
        command = [str(self.python), "-m", "pip", "--disable-pip-version-check", "install", *report]
        output = subprocess.run([*command, *requirements], check=True, stdout=subprocess.PIPE, text=True).stdout
        return names_and_versions(json.loads(output))

    def _works(self) -> bool:
        return self.python.exists() and succeeds([str(self.python), "-m", "pip", "--version"])

    def _share_packages_of_this_venv(self) -> None:
        # --system-site-packages shows the base interpreter's packages only, not those of a venv made from it.
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        output = subprocess.run([str(self.python), "-c", code], check=True, stdout=subprocess.PIPE, text=True)
        (Path(output.stdout.strip()) / "_parent.pth").write_text(sysconfig.get_path("purelib") + "\n")


def install_torch(venv: Venv) -> None:
    """Install torch: the CUDA build with an NVIDIA GPU, a CPU build otherwise."""
    index = os.environ.get("TORCH_INDEX")
    if index:
        venv.pip("install", "-qq", TORCH, "--index-url", index)
        return
    planned = venv.planned(TORCH)
    if "torch" not in planned:
        return  # an installed version suffices
    if has_gpu() or not cuda_packages(planned):
        say(f"installing torch {planned['torch']}")
        venv.pip("install", "-qq", TORCH)
        return
    say("installing the CPU build of torch")
    venv.pip("install", "-qq", "uv")
    # uv knows PyTorch's index of CPU builds.
    uv = [str(venv.python), "-m", "uv", "pip", "install", "--quiet", "--python", str(venv.python)]
    if not succeeds([*uv, "--torch-backend", "cpu", TORCH], quiet=False):
        fail(CUDA_TORCH)


def install_redis_server() -> None:
    """Install redis-server for tests of the prefix cache, if that needs no password.

    Those tests are skipped without it.
    """
    if shutil.which("redis-server"):
        return
    for command in redis_commands():
        say(f"installing redis-server: {' '.join(command)}")
        if not succeeds(command):
            break
    if not shutil.which("redis-server"):
        say("there is no redis-server: tests that need one are skipped (Debian, Ubuntu: apt-get install redis-server)")


def redis_commands() -> list[list[str]]:
    """Commands that install redis-server here; empty if unknown or not permitted."""
    if shutil.which("brew"):
        return [["brew", "install", "--quiet", "redis"]]
    if not shutil.which("apt-get"):
        return []
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    if as_root and not succeeds([*as_root, "true"]):
        return []
    apt = [*as_root, "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    return [[*apt, "update"], [*apt, "install", "-y", "--no-install-recommends", "redis-server"]]


def names_and_versions(report: dict[str, Any]) -> dict[str, str]:
    """Versions by lower-case name in a pip installation report."""
    return {item["metadata"]["name"].lower(): item["metadata"]["version"] for item in report.get("install", [])}


def cuda_packages(planned: dict[str, str]) -> list[str]:
    """The packages among the planned ones that only an NVIDIA GPU needs."""
    return sorted(name for name in planned if name.startswith(("nvidia-", "cuda-")))


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU with a working driver."""
    return shutil.which("nvidia-smi") is not None and succeeds(["nvidia-smi", "--list-gpus"])


def wants_system_packages() -> bool:
    """Whether the environment includes the packages of the Python that creates it."""
    return os.environ.get("SYSTEM_SITE_PACKAGES", "") not in ("", "0")


def inputs_key(venv: Venv) -> str:
    """Hash of all inputs of the installation."""
    parts = [(ROOT / "pyproject.toml").read_bytes(), Path(__file__).read_bytes()]
    # An editable installation only knows the top-level packages of its time.
    packages = sorted(path.parent.name for path in ROOT.glob("*/__init__.py"))
    texts = [str(ROOT), str(venv.directory), os.environ.get("TORCH_INDEX", ""), *packages]
    return hashlib.sha256(b"\0".join([*parts, *(text.encode() for text in texts)])).hexdigest()


def succeeds(command: list[str], quiet: bool = True) -> bool:
    """Whether a command runs and exits with 0."""
    sink = subprocess.DEVNULL if quiet else None
    try:
        return subprocess.run(command, stdout=sink, stderr=sink, check=False).returncode == 0
    except OSError:
        return False


def run(command: list[str]) -> None:
    """Run a command whose failure ends the set-up."""
    if not succeeds(command, quiet=False):
        fail(f"this failed, see above: {' '.join(command)}")


def main() -> None:
    """Set up the environment."""
    if sys.version_info < OLDEST_PYTHON:
        fail(
            f"Python 3.11 or newer is needed, this is {sys.version.split()[0]}; "
            "name another one: make setup PYTHON=python3.12"
        )
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv", help="where the environment goes")
    parser.add_argument("--tests", action="store_true", help="install what only tests need, too")
    arguments = parser.parse_args()
    venv, extras = Venv(arguments.venv.absolute()), TEST_EXTRAS if arguments.tests else EXTRAS
    key = inputs_key(venv)
    if arguments.tests:
        install_redis_server()
    if venv.is_current(key, extras):
        return
    venv.create()
    # Older versions download whole wheels to read metadata.
    venv.pip("install", "-qq", "pip>=25.1")
    try:
        install_torch(venv)
    except subprocess.CalledProcessError:
        fail(f"pip finds no {TORCH} for this Python and machine, see above")
    say("installing Coppice and its development tools")
    venv.pip("install", "-qq", "--editable", f"{ROOT}[{extras}]")
    venv.finish(key, extras)
    say(f"{venv.directory} is ready")


if __name__ == "__main__":
    main()
