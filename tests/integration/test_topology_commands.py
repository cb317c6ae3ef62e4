"""`coppice up` and `coppice generate`: real processes, fake models."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import ssl
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
from coppice.core.sampling import output_seed
from tests.certificates import directory
from tests.redis_server import NO_REDIS, PROGRAM, redis_server
from tests.tiny_checkpoint import write_names_of_a_checkpoint
from tests.toy_target import FINGERPRINT, babble, plain, toy_log_probs

ROOT = Path(__file__).resolve().parents[2]
PROMPT = [ord(character) for character in "def "]
EXPECTED = plain(babble, PROMPT, 20, seed=7)
TIMEOUT_S = 60
# Less than what requests that run have after SIGTERM (GRACE_S). It is 3 s where other work leaves a core free.
INTERRUPTED_S = 10

# Stands in for a service: what it does follows from the checkpoint that it is told to load.
SERVICE = """
import asyncio, os, signal, sys, time
from coppice.net.certificates import read_certificates
from coppice.net.rpc import stop_signal
from coppice.net.tls import server_tls
from tests.fakes import FakeDrafter, FakeVerifier, serving
from tests.toy_target import FINGERPRINT

async def main():
    model = os.environ["MODEL"]
    print("metrics at", os.environ["METRICS_PORT"], file=sys.stderr, flush=True)
    if model == "broken":
        sys.exit("cannot load the checkpoint")
    if model == "loading":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("begun", file=sys.stderr, flush=True)
        time.sleep(600)
    if model == "cut":
        sys.exit("cut into " + os.environ["TENSOR_PARALLEL"])
    kind = os.environ.get("DRAFTER_KIND")
    fingerprint = "foreign" if model == "foreign" else FINGERPRINT
    fake = FakeDrafter(kind=kind, tokenizer_fingerprint=fingerprint) if kind else FakeVerifier()
    if model == "slow":
        fake.pass_s = 2.0
    files = [os.environ.get(name, "") for name in ("TLS_CERT", "TLS_KEY", "TLS_CLIENT_CA")]
    certificates = read_certificates(server_tls(*files, is_internal=True), "TLS_")
    async with serving(fake, os.environ["LISTEN_ADDRESS"], certificates) as address:
        print("ready", address, flush=True)
        if model == "mortal":
            while not os.path.exists("end"):
                await asyncio.sleep(0.05)
            sys.exit("out of memory")
        await stop_signal()
    print("drained", file=sys.stderr, flush=True)

asyncio.run(main())
"""


@pytest.fixture
def services(tmp_path: Path) -> Path:
    """A directory in which `-m verifier_svc` and `-m drafter_svc` run fakes."""
    for model in ("toy", "slow", "broken", "cut", "foreign", "loading", "mortal"):
        write_names_of_a_checkpoint(tmp_path / model)
    for name in ("verifier_svc", "drafter_svc"):
        package = tmp_path / name
        package.mkdir()
        # The rest of the package is the real one: the command line knows services' settings.
        (package / "__init__.py").write_text("import pkgutil\n__path__ = pkgutil.extend_path(__path__, __name__)\n")
        (package / "__main__.py").write_text(SERVICE)
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
def metrics_port() -> int:
    """A port that is free, as are, in all likelihood, those behind it."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@pytest.fixture
def up(services: Path, metrics_port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `coppice up`, and its address."""
    port = ["--metrics-port", str(metrics_port)]
    process = start(services, "up", "-v", "--target", "toy", "--drafter", "small-lm=toy", *port)
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
        asked = ["--token-ids", ",".join(map(str, PROMPT)), "--max-tokens", "20", "--seed", "7", "--json"]
        _, answer, _ = generate(address, *asked, "--tls-ca", files.ca)
        assert json.loads(answer)["token_ids"] == EXPECTED
        code, _, err = generate(address, *asked)
        assert (code, err.startswith("coppice: UNAVAILABLE")) == (1, True)
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("form", [[], ["--tls"]], ids=["plain", "tls"])
def test_up_serves_http_where_it_is_given_a_port(services: Path, tmp_path: Path, form: list[str]) -> None:
    authority = trustme.CA()
    options = [*form, str(directory(tmp_path / "tls", authority).path)] if form else []
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    process = start(services, "up", "--target", "toy", "--drafter", "small-lm=toy", "--http-port", port, *options)
    try:
        assert process.stdout is not None
        said, ready = process.stdout.readline(), process.stdout.readline()
        scheme = "https" if form else "http"
        assert said == f"OpenAI's API at {scheme}://127.0.0.1:{port}/v1\n"
        assert ready.startswith("ready ")
        body = json.dumps({"model": "toy", "prompt": "def ", "max_tokens": 20, "seed": 7}).encode()
        url = f"{scheme}://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, body, {"content-type": "application/json"})
        context = ssl.create_default_context()
        authority.configure_trust(context)
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=context) as answer:
            assert json.load(answer)["choices"][0]["text"] == bytes(EXPECTED).decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=TIMEOUT_S) == 0
    finally:
        process.kill()
        process.communicate()


def generate(address: str, *arguments: str) -> tuple[int, str, str]:
    """The command, in this process."""
    ended = CliRunner().invoke(app, ["generate", "--address", address, *arguments])
    return ended.exit_code, ended.stdout, ended.stderr


def read_metrics(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
        text: bytes = answer.read()
        return text.decode()


def shows_several_outputs(address: str, *options: str) -> None:
    asked = ["--prompt", "def ", *options, "--num-outputs", "2"]
    seeds = [output_seed(7, index) for index in range(2)]
    texts = [bytes(plain(babble, PROMPT, 20, seed)).decode() for seed in seeds]
    _, out, err = generate(address, *asked, "--json")
    assert [(one["seed"], one["text"]) for one in json.loads(out)["outputs"]] == list(zip(seeds, texts, strict=True))
    assert set(json.loads(out)) == {"outputs"}, err
    _, out, err = generate(address, *asked)
    assert out == "".join(f"--- output {index}, seed {seeds[index]}\n{texts[index]}\n" for index in range(2)), err


def test_up_serves_completions_and_drains_when_it_is_told_to_stop(
    services: Path, up: tuple[subprocess.Popen[str], str], metrics_port: int
) -> None:
    process, address = up
    options = ["--max-tokens", "20", "--seed", "7"]

    code, out, err = run(services, "generate", "--address", address, "--prompt", "def ", *options, "--json")
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
        address, "--prompt", "def ", "--max-tokens", "1", "--seed", "7", "--json", "--top-log-probs", "1"
    )
    one = toy_log_probs(len(PROMPT), EXPECTED[0], 1)
    top = [{"token_id": one.top_token_ids[0], "log_prob": one.top_log_probs[0]}]
    assert json.loads(out)["log_probs"] == [{"log_prob": one.log_prob, "top": top}], err

    shows_several_outputs(address, *options)

    # The fake verifier offers nothing but the default.
    assert "not offer TRAVERSAL" in generate(address, "--prompt", "x", "--acceptance", "traversal")[2]

    file = services / "prompt.txt"
    file.write_text("def ")
    code, out, _ = generate(address, "--prompt-file", str(file), *options, "--speculation", "off")
    assert (code, out) == (0, bytes(EXPECTED).decode() + "\n")

    code, out, err = generate(address, "--token-ids", "4000000000")
    assert code == 1
    assert "INVALID_ARGUMENT: token_ids" in err
    assert "Traceback" not in err

    assert 'coppice_orchestrator_drafters_connected{kind="small-lm"} 1.0' in read_metrics(metrics_port)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    assert f"[verifier] metrics at {metrics_port + 1}" in err
    assert f"[drafter small-lm] metrics at {metrics_port + 2}" in err
    assert "[drafter small-lm] drained" in err
    assert "[verifier] drained" in err


@pytest.mark.parametrize("form", ["grpc", "http"])
def test_up_says_what_it_serves_and_stops_soon_after_ctrl_c(services: Path, metrics_port: int, form: str) -> None:
    options = ["--http-port", str(metrics_port)] if form == "http" else []
    process = start(services, "up", "--target", "slow", "--drafter", "small-lm=toy", *options)
    try:
        assert process.stdout is not None
        if form == "http":
            process.stdout.readline()
        address = process.stdout.readline().split()[1]
        # 20 passes of 2 s.
        options = ["--max-tokens", "20", "--seed", "7", "--speculation", "off"]
        client = start(services, "generate", "--address", address, "--prompt", "def ", *options)
        assert client.stdout is not None
        assert client.stdout.read(1), client.communicate()
        process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        _, err = process.communicate(timeout=TIMEOUT_S)
        # Without it, an output that runs keeps its services for GRACE_S, 10 s.
        assert time.monotonic() - started_s < INTERRUPTED_S
        client.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0
    lines = [line for line in err.splitlines() if not line.startswith("[")]
    assert [line.split()[0] for line in lines] == ["loading", "target", "drafters", "gain"]
    assert "small-lm" in lines[2]
    # What services log is for -v.
    assert "metrics at" not in err


def test_a_stream_over_http_is_told_of_ctrl_c(services: Path, metrics_port: int) -> None:
    process = start(services, "up", "--target", "slow", "--drafter", "small-lm=toy", "--http-port", str(metrics_port))
    connection = http.client.HTTPConnection("127.0.0.1", metrics_port, timeout=TIMEOUT_S)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        connection.request("GET", "/v1/models")
        [model] = json.loads(connection.getresponse().read())["data"]
        # 20 passes of 2 s.
        fields = {"model": model["id"], "prompt": "def ", "max_tokens": 20, "seed": 7, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(fields), {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            assert response.status == 200
            assert response.readline().startswith(b"data: ")
            process.send_signal(signal.SIGINT)
            *_, error, end = [line for line in response if line.startswith(b"data: ")]
        process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
        connection.close()
    assert json.loads(error.removeprefix(b"data: "))["error"]["code"] == "unavailable"
    assert end == b"data: [DONE]\n"
    assert process.returncode == 0


def test_ctrl_c_ends_what_is_still_loading_soon(services: Path) -> None:
    process = start(services, "up", "-v", "--target", "toy", "--drafter", "small-lm=loading")
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.endswith("begun\n"):
                break
        process.send_signal(signal.SIGINT)
        started_s = time.monotonic()
        out, err = process.communicate(timeout=TIMEOUT_S)
        assert time.monotonic() - started_s < INTERRUPTED_S
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_a_start_that_takes_long_says_why_and_ends_on_ctrl_c(services: Path) -> None:
    process = start(services, "up", "--target", "toy", "--drafter", "small-lm=loading")
    try:
        assert process.stderr is not None
        assert process.stderr.readline() == "loading toy ...\n"
        assert process.stderr.readline().startswith("still loading: the first start on a machine compiles")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_ctrl_c_ends_a_command_whose_modules_are_still_imported(services: Path) -> None:
    # Found before the real one.
    (services / "typer.py").write_text("import time; print('begun', flush=True); time.sleep(600)")
    process = start(services, "up", "--target", "toy")
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert (process.returncode, err) == (130, "")


def test_up_starts_several_verifiers_each_with_a_port_for_its_metrics(
    services: Path, metrics_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METRICS_PORT", str(metrics_port))
    arguments = [
        "up",
        "-v",
        "--target",
        "toy",
        "--verifiers",
        "2",
        "--drafter",
        "small-lm=toy",
        "--drafter",
        "small-lm=toy",
    ]
    process = start(services, *arguments)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().split()[1]
        code, out, err = generate(address, "--prompt", "def ", "--max-tokens", "20", "--seed", "7")
        assert (code, out) == (0, bytes(EXPECTED).decode() + "\n"), err
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 0, err
    assert err.count("[drafter small-lm] drained") == 2
    for place, name in enumerate(("verifier 1", "verifier 2", "drafter small-lm", "drafter small-lm"), 1):
        assert f"[{name}] metrics at {metrics_port + place}" in err
    assert "[verifier 1] drained" in err
    assert "[verifier 2] drained" in err


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
    assert code == 2
    assert not out
    assert "has another tokenizer than the target" in err
    assert FINGERPRINT in err


@pytest.mark.parametrize(("model", "words"), [("broken", "cannot load the checkpoint"), ("mortal", "out of memory")])
def test_up_ends_with_the_last_words_of_a_service_that_ended(services: Path, model: str, words: str) -> None:
    """One ends before it is ready; the other when it is told to, once all are."""
    process = start(services, "up", "--target", "toy", "--drafter", f"small-lm={model}")
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("ready ") == (model == "mortal")
        (services / "end").touch()
        _, err = process.communicate(timeout=TIMEOUT_S)
    finally:
        process.kill()
    assert process.returncode == 1
    ended = " ended with exit code 1" if model == "mortal" else ""
    assert err.splitlines()[-1] == f"coppice: drafter small-lm{ended}: {words}"


def test_up_tells_the_verifier_into_how_many_parts_the_target_is_cut(services: Path) -> None:
    code, _, err = run(services, "up", "--target", "cut", "--drafter", "none", "--tensor-parallel", "3")
    assert code == 1
    assert "coppice: verifier: cut into 3" in err


def test_generate_says_why_nobody_answers() -> None:
    code, out, err = generate("127.0.0.1:1", "--prompt", "x")
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
    assert result.stderr.startswith("coppice: ")
    assert result.stderr.count("\n") == 1


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
