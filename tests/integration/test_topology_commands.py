"""`coppice up` and `coppice generate`: real processes, fake models."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from typer.testing import CliRunner

from coppice.cli.__main__ import app
from coppice.client import Client, Options
from coppice.output_seed import output_seed
from tests.certificates import directory
from tests.redis_server import NO_REDIS, PROGRAM, redis_server
from tests.toy_target import FINGERPRINT, babble, plain, toy_log_probs

pytestmark = pytest.mark.processes

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [ord(character) for character in "def "]
EXPECTED = plain(babble, PROMPT, 20, seed=7)
TIMEOUT_S = 60

# Stands in for a service: what it does follows from the checkpoint that it is told to load.
SERVICE = """
import asyncio, os, sys
from coppice.certificates import read_certificates
from coppice.rpc import stop_signal
from coppice.tls import server_tls
from tests.fakes import FakeDrafter, FakeVerifier, serving
from tests.redis_server import NO_REDIS, PROGRAM, redis_server
from tests.toy_target import FINGERPRINT

async def main():
    model = os.environ["MODEL"]
    print("metrics at", os.environ["METRICS_PORT"], file=sys.stderr, flush=True)
    if model == "broken":
        sys.exit("cannot load the checkpoint")
    if model == "cut":
        sys.exit("cut into " + os.environ["TENSOR_PARALLEL"])
    kind = os.environ.get("DRAFTER_KIND")
    fingerprint = "foreign" if model == "foreign" else FINGERPRINT
    fake = FakeDrafter(kind=kind, tokenizer_fingerprint=fingerprint) if kind else FakeVerifier()
    files = [os.environ.get(name, "") for name in ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")]
    certificates = read_certificates(server_tls(*files, is_internal=True), "TLS_")
    async with serving(fake, os.environ["LISTEN_ADDRESS"], certificates) as address:
        print("ready", address, flush=True)
        if model == "mortal":
            await asyncio.sleep(1.5)
            sys.exit("out of memory")
        await stop_signal()
    print("drained", file=sys.stderr, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def services(tmp_path: Path) -> Path:
    """A directory in which `-m verifier_svc` and `-m drafter_svc` run fakes."""
    for name in ("verifier_svc", "drafter_svc"):
        (tmp_path / f"{name}.py").write_text(SERVICE)
    return tmp_path


def start(directory: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "coppice.cli", *arguments],
        cwd=directory,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(directory: Path, *arguments: str) -> tuple[int, str, str]:
    process = start(directory, *arguments)
    try:
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    return process.returncode, out, err


@pytest.fixture
def up(services: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `coppice up`, and its address."""
    process = start(services, "up", "--target", "toy", "--drafter", "small-lm=toy")
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    assert line.startswith("ready 127.0.0.1:"), process.stderr.read()
    yield process, line.split()[1]
    process.kill()
    process.communicate()


def test_up_with_certificates_serves_those_alone_who_trust_them(services: Path, tmp_path: Path) -> None:
    files = directory(tmp_path / "tls", trustme.CA())
    process = start(services, "up", "--target", "toy", "--drafter", "small-lm=toy", "--tls", str(files.path))
    try:
        assert process.stdout is not None
        address = process.stdout.readline().split()[1]
        asked = ["generate", "--address", address, "--token-ids", ",".join(map(str, PROMPT))]
        asked += ["--max-tokens", "20", "--seed", "7", "--json"]
        answered = CliRunner().invoke(app, [*asked, "--tls-ca", files.ca])
        assert tuple(json.loads(answered.stdout)["token_ids"]) == tuple(EXPECTED)
        refused = CliRunner().invoke(app, asked)
        assert (refused.exit_code, refused.stderr.startswith("coppice: UNAVAILABLE")) == (1, True)
    finally:
        process.kill()
        process.communicate()


def generate(directory: Path, address: str, *arguments: str) -> tuple[int, str, str]:
    return run(directory, "generate", "--address", address, *arguments)


def test_up_serves_completions_and_drains_when_it_is_told_to_stop(
    services: Path, up: tuple[subprocess.Popen[str], str]
) -> None:
    process, address = up
    options = ["--max-tokens", "20", "--seed", "7"]

    code, out, err = generate(services, address, "--prompt", "def ", *options, "--json")
    assert code == 0, err
    answer = json.loads(out)
    assert set(answer) == {"text", "token_ids", "finish_reason", "usage", "speculation", "timing"}
    assert answer["token_ids"] == EXPECTED
    assert answer["text"] == bytes(EXPECTED).decode()
    assert answer["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": 4, "completion_tokens": 20}
    counts = {"rounds", "draft_tokens", "accepted_tokens", "mean_acceptance_length", "sources"}
    assert set(answer["speculation"]) == counts
    assert answer["speculation"]["mean_acceptance_length"] == 20 / answer["speculation"]["rounds"]
    assert set(answer["timing"]) == {"ttft_ms", "tpot_ms", "total_ms"}

    code, out, err = generate(
        services, address, "--prompt", "def ", "--max-tokens", "1", "--seed", "7", "--json", "--top-log-probs", "1"
    )
    one = toy_log_probs(len(PROMPT), EXPECTED[0], 1)
    top = [{"token_id": one.top_token_ids[0], "log_prob": one.top_log_probs[0]}]
    assert json.loads(out)["log_probs"] == [{"log_prob": one.log_prob, "top": top}], err

    several = [*options, "--num-outputs", "2"]
    seeds = [output_seed(7, index) for index in range(2)]
    texts = [bytes(plain(babble, PROMPT, 20, seed)).decode() for seed in seeds]
    code, out, err = generate(services, address, "--prompt", "def ", *several, "--json")
    assert [(one["seed"], one["text"]) for one in json.loads(out)["outputs"]] == list(zip(seeds, texts, strict=True))
    assert set(json.loads(out)) == {"outputs"}, err
    code, out, err = generate(services, address, "--prompt", "def ", *several)
    assert out == "".join(f"--- output {index}, seed {seeds[index]}\n{texts[index]}\n" for index in range(2)), err

    # The fake verifier offers nothing but the default.
    assert "not offer TRAVERSAL" in generate(services, address, "--prompt", "x", "--acceptance", "traversal")[2]

    file = services / "prompt.txt"
    file.write_text("def ")
    code, out, _ = generate(services, address, "--prompt-file", str(file), *options, "--speculation", "off")
    assert (code, out) == (0, bytes(EXPECTED).decode() + "\n")

    ids = ",".join(map(str, PROMPT))
    code, out, err = generate(services, address, "--token-ids", ids, "--temperature", "-1")
    assert code == 1
    assert "INVALID_ARGUMENT: sampling.temperature" in err
    assert "Traceback" not in err

    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    # In the opposite order of their start.
    assert err.index("[drafter small-lm] drained") < err.index("[verifier] drained")


def test_up_starts_several_verifiers_and_ends_when_one_does(services: Path) -> None:
    arguments = ["up", "--target", "toy", "--verifiers", "2", "--drafter", "small-lm=toy", "--drafter", "small-lm=toy"]
    process = start(services, *arguments)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[1]
        code, out, err = generate(services, address, "--prompt", "def ", "--max-tokens", "20", "--seed", "7")
        assert (code, out) == (0, bytes(EXPECTED).decode() + "\n"), err
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert err.count("[drafter small-lm] drained") == 2
    assert "[verifier 1] drained" in err
    assert "[verifier 2] drained" in err


@pytest.mark.parametrize("named_by", ["option", "environment"])
def test_up_gives_each_service_a_port_for_its_metrics(
    services: Path, named_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--metrics-port", str(port)] if named_by == "option" else []
    if not options:
        monkeypatch.setenv("METRICS_PORT", str(port))
    process = start(services, "up", "--target", "toy", "--drafter", "small-lm=toy", *options)
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready ")
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
            text = answer.read().decode()
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert 'coppice_orchestrator_drafters_connected{kind="small-lm"} 1.0' in text
    assert f"[verifier] metrics at {port + 1}" in err
    assert f"[drafter small-lm] metrics at {port + 2}" in err


def test_killing_up_takes_its_services_along(up: tuple[subprocess.Popen[str], str]) -> None:
    process, _ = up
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        pytest.skip("needs Linux's list of a process's children")
    pids = children.read_text().split()
    assert len(pids) == 3
    process.kill()
    deadline = time.monotonic() + 20
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_generate_starts_a_private_topology(services: Path) -> None:
    options = ["--target", "toy", "--drafter", "none", "--max-tokens", "20", "--seed", "7"]
    code, out, err = run(services, "generate", "--prompt", "def ", *options)
    assert (code, out) == (0, bytes(EXPECTED).decode() + "\n"), err
    assert not err


def test_up_refuses_a_drafter_with_another_tokenizer(services: Path) -> None:
    code, out, err = run(services, "up", "--target", "toy", "--drafter", "small-lm=foreign")
    assert code == 1
    assert not out
    assert "has another tokenizer than the target" in err
    assert FINGERPRINT in err


@pytest.mark.parametrize(("model", "words"), [("broken", "cannot load the checkpoint"), ("mortal", "out of memory")])
def test_up_ends_with_the_last_words_of_a_service_that_ended(services: Path, model: str, words: str) -> None:
    code, _, err = run(services, "up", "--target", "toy", "--drafter", f"small-lm={model}")
    assert code == 1
    _, said, last_words = err.partition("coppice: drafter small-lm ended with exit code 1\n")
    assert said
    # Other lines may come before: what the service had under way when it ended.
    assert f"  [drafter small-lm] {words}" in last_words


def test_up_tells_the_verifier_into_how_many_parts_the_target_is_cut(services: Path) -> None:
    code, _, err = run(services, "up", "--target", "cut", "--drafter", "none", "--tensor-parallel", "3")
    assert code == 1
    assert "  [verifier] cut into 3" in err


def test_generate_says_why_nobody_answers(tmp_path: Path) -> None:
    code, out, err = generate(tmp_path, "127.0.0.1:1", "--prompt", "x")
    assert (code, out) == (1, "")
    assert err.startswith("coppice: UNAVAILABLE")


@pytest.mark.parametrize(
    "arguments",
    [
        ["generate"],
        ["generate", "--prompt", "a", "--token-ids", "1"],
        ["generate", "--token-ids", "1,x"],
        ["generate", "--prompt", "a", "--top-log-probs", "21"],
        ["generate", "--prompt", "a", "--acceptance", "typical"],
        ["generate", "--prompt-file", "absent.txt"],
        ["generate", "--prompt", "a", "--json-schema", "absent.json"],
        ["generate", "--prompt", "a", "--json-schema", "{}", "--regex", "x"],
        ["up", "--drafter", "none", "--drafter", "small-lm"],
        ["up", "--drafter", "=x"],
        ["up", "--device", "abacus"],
        ["up", "--verifiers", "0"],
    ],
    ids=" ".join,
)
def test_wrong_options_end_with_code_2(arguments: list[str]) -> None:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert not result.stdout
    assert "Usage:" in result.stderr


@pytest.mark.redis
@pytest.mark.skipif(PROGRAM is None, reason=NO_REDIS)
async def test_up_keeps_what_it_remembers_in_redis(services: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_SECRET", "of all")
    async with redis_server() as redis, redis.client() as own:
        process = start(services, "up", "--drafter", "none", "--redis", redis.url)
        try:
            assert process.stdout is not None
            ready = await asyncio.to_thread(process.stdout.readline)
            async with Client(ready.split()[1]) as client:
                completion = await client.generate(PROMPT, Options(max_tokens=20, seed=7))
            assert list(completion.token_ids) == EXPECTED
            async with asyncio.timeout(TIMEOUT_S):
                while not await own.dbsize():  # noqa: ASYNC110 - another process writes
                    await asyncio.sleep(0.02)
        finally:
            process.terminate()
            await asyncio.to_thread(process.communicate, timeout=TIMEOUT_S)
    assert process.returncode == 0
