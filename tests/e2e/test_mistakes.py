"""Mistakes that users make on the command line: each is told in one line, with an exit code, and soon.

`docs/mistakes.md` has a table of them. With COPPICE_WRITE_TABLES=1 it is written anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import socket
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trustme

from coppice.net.access_token import new_token, token_digest
from orchestrator.app import running
from orchestrator.config import Config
from tests.certificates import Directory, directory
from tests.fakes import FakeVerifier, serving
from tests.tiny_checkpoint import write_tiny_llama

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "mistakes.md"
HEAD = "| Mistake | Command | What it says | Exit code | Seconds |\n|---|---|---|---|---|\n"
COMMAND_S = 60.0
# Runs a program without root's rights to read and write any file and to take any port: CAP_DAC_OVERRIDE,
# CAP_DAC_READ_SEARCH, CAP_NET_BIND_SERVICE, by PR_CAPBSET_DROP. Other users have none of them.
UNPRIVILEGED = """
import ctypes, os, sys
for capability in (1, 2, 10):
    ctypes.CDLL(None).prctl(24, capability, 0, 0, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
# Where no model has to be loaded.
MOST_SECONDS = 3.0
TRIALS = 4
FAILED, WRONG = 1, 2
# What libraries say of a connection, by their version.
LIBRARIES_WORDS = re.compile(r"last error: .*?(?=; does it run| \|)")


@dataclass(frozen=True)
class Mistake:
    """A command with DIR and ports by name in it, and how it ends; `without`: a module that is not installed."""

    what: str
    command: str
    exit_code: int = WRONG
    env: dict[str, str] = field(default_factory=dict)
    without: str = ""
    # A service finds it, after it has imported torch.
    is_found_late: bool = False
    # Of a user other than root, who may do anything.
    is_unprivileged: bool = False

    @property
    def shown(self) -> str:
        settings = "".join(f"{name}={value} " for name, value in self.env.items() if name not in QUIET)
        return f"{settings}coppice {self.command}"


# A hub that nobody answers for, wherever this runs.
NO_HUB = {"HF_ENDPOINT": "http://127.0.0.1:1", "HF_HUB_CACHE": "DIR/hub"}
QUIET = NO_HUB
PORT_FOR_ROOT = "a port for root"
# From this port on anybody may take one; 0 in many containers.
FIRST_FREE = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
ASK = "generate --prompt x --address"
TINY = "--target DIR/tiny"

MISTAKES = (
    Mistake("a path that does not exist", "up --target no/such/directory"),
    Mistake("a hub id without network", "up --target somebody/some-model", env=NO_HUB),
    Mistake(
        "a hub that says nothing", "up --target somebody/some-model", env=NO_HUB | {"HF_ENDPOINT": "http://SILENT"}
    ),
    Mistake("a slip in a short name", "up --target smolm2-135m"),
    Mistake("a GGUF file that does not exist", "up --target DIR/model.gguf"),
    Mistake("a GGUF file that is none", "up --target DIR/no-model.gguf"),
    Mistake("no place for its conversion", "up --target DIR/no-model.gguf", env={"COPPICE_CACHE": "DIR/a-file/cache"}),
    Mistake("a file that is no model", "up --target DIR/a-file"),
    Mistake("a directory without a model", "up --target DIR/empty --drafter none"),
    Mistake("a directory that may not be read", "up --target DIR/locked", is_unprivileged=True),
    Mistake("a configuration that may not be read", "up --target DIR/no-config", is_unprivileged=True),
    Mistake("weights that may not be read", "up --target DIR/no-weights", is_unprivileged=True),
    Mistake("a GGUF file that may not be read", "up --target DIR/locked.gguf", is_unprivileged=True),
    Mistake("a key that may not be read", f"up {TINY} --tls DIR/no-key", is_unprivileged=True),
    Mistake("no right to write a drafter", f"adapt {TINY} --out DIR/read-only/head", is_unprivileged=True),
    Mistake("no right to write a model", "train target --out DIR/read-only/target", is_unprivileged=True),
    Mistake("no right to write a file", f"export gguf {TINY} --out DIR/read-only/x.gguf", is_unprivileged=True),
    Mistake(PORT_FOR_ROOT, f"up {TINY} --port 80", is_unprivileged=True),
    Mistake("an unknown kind of drafter", "up --drafter smal-lm"),
    Mistake("a drafter with another tokenizer", f"up {TINY} --drafter small-lm"),
    Mistake("an EAGLE head for another target", f"up {TINY} --drafter eagle=DIR/eagle", is_found_late=True),
    Mistake("an adapter that is not there", "up --space DIR"),
    Mistake("a port in use", f"up {TINY} --port PORT"),
    Mistake("a port that no host has", "doctor --port 65536"),
    Mistake("a file of tokens that is not there", f"up {TINY}", env={"TOKENS_FILE": "DIR/no-tokens"}),
    Mistake("a source of drafts that is none", f"generate {TINY} --prompt x --speculation fast"),
    Mistake("a target for what serves already", f"generate {TINY} --prompt x --address 127.0.0.1:1"),
    Mistake("a port for HTTP in use", f"up {TINY} --http-port PORT"),
    Mistake("a port for metrics in use", f"up {TINY} --metrics-port PORT"),
    Mistake("coppice without extras", "up", without="torch"),
    Mistake("HTTP without its extra", f"up {TINY} --http-port 8000", without="starlette"),
    Mistake("Redis without its extra", f"up {TINY} --redis redis://127.0.0.1", without="redis"),
    Mistake("no URL of a Redis", f"up {TINY} --redis localhost"),
    Mistake("a setting that makes no sense", f"up {TINY}", env={"THREADS": "many"}),
    Mistake("a device that does not exist", f"up {TINY} --device gpu"),
    Mistake("a directory without certificates", f"up {TINY} --tls DIR"),
    Mistake("a certificate that has expired", f"up {TINY} --tls DIR/expired"),
    Mistake("a command that does not exist", "upp"),
    Mistake("an option that does not exist", "up --prot 50050"),
    Mistake("a prompt's file that does not exist", "generate --prompt-file DIR/prompt.txt"),
    Mistake("an address without a port", f"{ASK} localhost"),
    Mistake("a port where nothing listens", f"{ASK} 127.0.0.1:1", FAILED),
    Mistake("a server without TLS's options", f"{ASK} SERVER", FAILED),
    Mistake("the CA of another server", f"{ASK} SERVER --tls-ca DIR/other/ca.pem", FAILED),
    Mistake("a certificate for another name", f"{ASK} SERVER --tls-ca DIR/tls/ca.pem --tls-name elsewhere", FAILED),
    Mistake("no token", f"{ASK} SERVER --tls-ca DIR/tls/ca.pem", FAILED),
    Mistake(
        "a chat with a model without a template", f"{ASK} SERVER --tls-ca DIR/tls/ca.pem --token TOKEN --chat", FAILED
    ),
)


@dataclass(frozen=True)
class Ending:
    """How a command ended: its only line, its exit code, and after how long."""

    line: str
    exit_code: int
    seconds: float


async def ended(mistake: Mistake, names: dict[str, str]) -> Ending:
    """Make a mistake."""
    env = {name: named(value, names) for name, value in mistake.env.items()}
    hidden = f"sys.modules[{mistake.without!r}] = None; " if mistake.without else ""
    program = f"import sys; {hidden}sys.argv[0] = 'coppice'; from coppice.cli.__main__ import main; main()"
    drop = ["-c", UNPRIVILEGED, sys.executable] if mistake.is_unprivileged else []
    started_s = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *drop, "-c", program, *(named(part, names) for part in mistake.command.split())),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=names["DIR"],
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
    )
    async with asyncio.timeout(COMMAND_S):
        output, errors = await process.communicate()
    seconds = time.monotonic() - started_s
    assert not output, mistake.what
    # What another service has to warn of may come before.
    lines = [line for line in errors.decode().splitlines() if not line.startswith(("loading ", "[verifier] "))]
    assert len(lines) == 1, errors.decode()
    assert process.returncode is not None
    return Ending(unnamed(lines[0], names), process.returncode, seconds)


async def soonest(mistake: Mistake, names: dict[str, str]) -> Ending:
    """The first of a few trials that is quick enough, or the last: other work on the machine takes time, too."""
    for _ in range(TRIALS):
        ending = await ended(mistake, names)
        if mistake.is_found_late or ending.seconds < MOST_SECONDS:
            break
    return ending


def named(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(name, value)
    return text


def unnamed(text: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        text = text.replace(value, name)
    return text.replace(str(ROOT / "models"), "MODELS").replace("python -c", "coppice")


@contextlib.asynccontextmanager
async def server(files: Directory, tokens: Path) -> AsyncIterator[str]:
    """An orchestrator with TLS that asks for tokens, in front of a verifier that computes nothing."""
    async with serving(FakeVerifier()) as verifier:
        own = {"tls_cert": files.cert, "tls_key": files.key, "tokens_file": str(tokens)}
        async with running(Config(verifier_address=verifier, listen_address="127.0.0.1:0", **own)) as orchestrator:
            yield orchestrator.address


def row(mistake: Mistake, ending: Ending) -> str:
    line = ending.line.replace("|", "\\|")
    return f"| {mistake.what} | `{mistake.shown}` | {line} | {ending.exit_code} | {ending.seconds:.1f} |\n"


def possible() -> tuple[Mistake, ...]:
    """Mistakes that can be made on this machine."""
    is_for_root = not FIRST_FREE.is_file() or int(FIRST_FREE.read_text()) > 80
    return tuple(one for one in MISTAKES if is_for_root or one.what != PORT_FOR_ROOT)


def comparable(line: str) -> str:
    """A row of the table without what differs from run to run."""
    return LIBRARIES_WORDS.sub("last error", re.sub(r"\| [\d.]+ \|$", "", line.rstrip("\n")))


@pytest.mark.timeout(400)
async def test_each_is_told_in_one_line_as_the_table_says(tmp_path: Path) -> None:
    place = tmp_path / "place"
    write_tiny_llama(place / "tiny", vocab_size=64, max_context_tokens=64)
    (place / "eagle").symlink_to(ROOT / "models" / "eagle-smollm2")
    (place / "empty").mkdir()
    (place / "a-file").write_text("x")
    (place / "no-model.gguf").write_text("x")
    files = directory(place / "tls", trustme.CA())
    directory(place / "other", trustme.CA())
    directory(place / "expired", trustme.CA(), expired=True)
    for name, file in (("no-config", "config.json"), ("no-weights", "model.safetensors")):
        write_tiny_llama(place / name, vocab_size=64, max_context_tokens=64)
        (place / name / file).chmod(0)
    (place / "locked.gguf").write_text("x")
    directory(place / "no-key", trustme.CA())
    for name in ("locked", "read-only"):
        (place / name).mkdir()
    for name, mode in (("locked.gguf", 0), ("no-key/key.pem", 0), ("locked", 0), ("read-only", 0o555)):
        (place / name).chmod(mode)
    token, mistakes = new_token(), possible()
    (place / "tokens").write_text(f'{{"tenant": "alice", "sha256": ["{token_digest(token)}"]}}\n')
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as silent:
        async with server(files, place / "tokens") as address:
            port = str(taken.getsockname()[1])
            silent_address = f"127.0.0.1:{silent.getsockname()[1]}"
            names = {"DIR": str(place), "PORT": port, "SERVER": address, "TOKEN": token, "SILENT": silent_address}
            endings = [await soonest(mistake, names) for mistake in mistakes]
    for mistake, ending in zip(mistakes, endings, strict=True):
        assert ending.exit_code == mistake.exit_code, (mistake.what, ending)
        assert mistake.is_found_late or ending.seconds < MOST_SECONDS, (mistake.what, ending)
    rows = [row(mistake, ending) for mistake, ending in zip(mistakes, endings, strict=True)]
    before, head, table = DOCUMENT.read_text().partition(HEAD)
    assert head
    if os.environ.get("COPPICE_WRITE_TABLES") == "1":
        DOCUMENT.write_text(before + head + "".join(rows))
        return
    left_out = {mistake.what for mistake in MISTAKES} - {mistake.what for mistake in mistakes}
    expected = [line for line in table.splitlines() if line.split(" | ")[0].removeprefix("| ") not in left_out]
    assert [comparable(line) for line in expected] == [comparable(line) for line in rows]
