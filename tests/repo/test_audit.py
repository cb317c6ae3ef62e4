"""What `make audit` says of pip-audit's answers: a vulnerability fails, and what was not looked up is not safe."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "audit.sh"
CLEAN = "No known vulnerabilities found"
LACKS = "regex Dependency not found on PyPI and could not be audited: regex (1.0)"
VULNERABLE = "Found 1 known vulnerability in 1 package\nregex 1.0 CVE-2026-0001 1.1"
UNREACHED = "requests.exceptions.ConnectionError: Failed to resolve the database"


def audited(venv: Path, gateway: str, code: int) -> tuple[int, list[str]]:
    """Exit code and lines of the script where pip-audit says this of the gateway's lock, and nothing of the others."""
    [version] = re.findall(r"pip-audit (\d\S+)\)", SCRIPT.read_text())
    tool = venv / "pip-audit" / version / "bin" / "pip-audit"
    tool.parent.mkdir(parents=True)
    tool.write_text(f"""#!/bin/sh
case "$*" in *gateway.txt) echo '{gateway}' >&2; exit {code};; *) echo '{CLEAN}';; esac
""")
    tool.chmod(0o755)
    run = subprocess.run([SCRIPT, venv], capture_output=True, text=True, timeout=60, check=False)
    assert not run.stderr
    return run.returncode, run.stdout.splitlines()


def test_every_lock_and_torch_are_looked_up(tmp_path: Path) -> None:
    code, lines = audited(tmp_path, CLEAN, 0)
    [torch] = set(re.findall(r"TORCH_VERSION=(\S+)\n", (ROOT / "docker" / "verifier.Dockerfile").read_text()))
    whats = [*sorted(f"docker/locks/{path.name}" for path in (ROOT / "docker" / "locks").iterdir()), f"torch=={torch}"]
    assert (code, lines) == (0, [f"audit: {what} has no known vulnerability" for what in whats])


@pytest.mark.parametrize("said", [VULNERABLE, f"{VULNERABLE}\n{LACKS}"])
def test_a_vulnerability_fails_and_is_shown_also_next_to_a_package_that_the_database_lacks(
    tmp_path: Path, said: str
) -> None:
    code, lines = audited(tmp_path, said, 1)
    assert code == 1
    assert "regex 1.0 CVE-2026-0001 1.1" in lines


@pytest.mark.parametrize(
    ("said", "code", "line"),
    [
        (f"{CLEAN}\n{LACKS}", 0, "audit: the database lacks 1 packages of docker/locks/gateway.txt, which are SKIPPED"),
        (UNREACHED, 1, "audit: the database of vulnerabilities cannot be had, so docker/locks/gateway.txt is SKIPPED"),
    ],
)
def test_what_was_not_looked_up_is_called_skipped(tmp_path: Path, said: str, code: int, line: str) -> None:
    exit_code, lines = audited(tmp_path, said, code)
    assert exit_code == 0
    assert line in lines
