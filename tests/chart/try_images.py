"""Build the images of `docker/`, check their contents, run the topology as on Kubernetes, and write their provenance.

Standard library only; needs docker or podman. Exits with code 1 at the first failure.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import re
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("orchestrator", "verifier", "drafter", "gateway")
# As in the chart: an unprivileged user, a read-only root except /tmp, no capabilities.
CONFINED = ("--read-only", "--tmpfs", "/tmp", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
START_S = 180.0
COMMAND_S = 120.0
# Grace periods of drafter and verifier are 5 and 20 s.
STOP_S = 30
BUILD_S = 3600.0
# Next to the bills of materials of `make sbom`.
PROVENANCE = ROOT / "build" / "sbom"
PROMPT = "def read_lines(path):\n"
NUM_TOKENS = 48
# Run inside an image; prints its findings as JSON.
LOOK = """
import importlib.util, json, os, pathlib, shutil, sys
def writes(path):
    try:
        pathlib.Path(path).write_text("x")
        return True
    except OSError:
        return False
print(json.dumps({
    "uid": os.getuid(),
    "writes": [path for path in ("/x", "/opt/coppice/x", "/models/x", "/etc/x", "/tmp/x") if writes(path)],
    "compilers": [name for name in ("cc", "gcc", "g++", "clang", "make") if shutil.which(name)],
    "packages": [name for name in ("pip", "torch", "transformers", "numba", "redis") if importlib.util.find_spec(name)],
    "models": sorted(path.name for path in pathlib.Path("/models").glob("*")),
}))
"""
PACKAGES = {
    "orchestrator": ["redis"],
    "gateway": [],
    "verifier": ["torch", "transformers", "numba"],
    "drafter": ["torch", "transformers", "numba"],
}
MODELS = {
    "orchestrator": [],
    "gateway": [],
    "verifier": ["early-head", "space", "target"],
    "drafter": ["boost-1", "diffusion", "eagle-smollm2", "semi-ar", "small-lm"],
}


def fail(message: str) -> NoReturn:
    """Stop with a message; context managers stop the containers."""
    raise SystemExit(f"images: {message}")


def say(message: str) -> None:
    """Print a message, unbuffered."""
    sys.stdout.write(f"images: {message}\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Engine:
    """A container engine's command line."""

    command: tuple[str, ...]
    tag: str
    run_options: tuple[str, ...] = ()

    def image(self, service: str) -> str:
        """Name of a service's image."""
        return f"coppice/{service}:{self.tag}"

    def build(self, service: str, options: Sequence[str]) -> None:
        """Build a service's image from its Dockerfile."""
        dockerfile = f"docker/{service}.Dockerfile"
        arguments = ["build", *options, "-f", dockerfile, "-t", self.image(service), "."]
        if subprocess.run([*self.command, *arguments], cwd=ROOT, timeout=BUILD_S, check=False).returncode:
            fail(f"{dockerfile} does not build")

    def image_id(self, image: str) -> str:
        """The sha256 by which the engine knows an image, mostly of its configuration; no registry knows it."""
        return self._call("image", "inspect", "--format", "{{.Id}}", image).removeprefix("sha256:")

    def digest(self, image: str) -> dict[str, Any]:
        """An image's digest as fields of in-toto: of its manifest, as registries have it, or else its id."""
        known = json.loads(self._call("image", "inspect", "--format", "{{json .RepoDigests}}", image)) or []
        # Of images that were not pushed, podman writes digests of its own under this name.
        pushed = [one.rpartition("@sha256:")[2] for one in known if not one.startswith("localhost/")]
        digest, kind = (pushed[0], "manifest") if pushed else (self.image_id(image), "image id")
        return {"digest": {"sha256": digest}, "annotations": {"digest_of": kind}}

    def output(self, service: str, entrypoint: str, *arguments: str) -> str:
        """Output of a command run in a service's image, on the host's network."""
        options = ["run", "--rm", *self.run_options, *CONFINED, "--network", "host", "--entrypoint", entrypoint]
        command = [*self.command, *options, self.image(service), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if done.returncode:
            fail(f"{service}: {entrypoint} {shlex.join(arguments)} failed: {done.stderr.strip()}")
        return done.stdout

    @contextlib.contextmanager
    def running(self, service: str, port: int, **variables: str) -> Iterator[str]:
        """A running service on a port of this machine; yields the container's name."""
        name = f"coppice-{service}-{uuid.uuid4().hex[:8]}"
        settings = {"LISTEN_ADDRESS": f"127.0.0.1:{port}", **variables}
        environment = [f"--env={key}={value}" for key, value in settings.items()]
        options = ["run", "--detach", "--name", name, *self.run_options, *CONFINED, "--network", "host", *environment]
        self._call(*options, self.image(service))
        try:
            self._wait(name, port)
            yield name
        except SystemExit:
            say(f"{name} said:\n{self._logs(name)}")
            raise
        finally:
            subprocess.run([*self.command, "rm", "--force", name], capture_output=True, timeout=COMMAND_S, check=False)

    def stop(self, name: str) -> tuple[int, float]:
        """Stop a container as Kubernetes does; returns its exit code and the seconds it took."""
        started_s = time.monotonic()
        self._call("stop", "--time", str(STOP_S), name)
        took_s = time.monotonic() - started_s
        return int(self._call("inspect", "--format", "{{.State.ExitCode}}", name)), took_s

    def _wait(self, name: str, port: int) -> None:
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            # Not the port: drafters listen before they are ready.
            if f"ready 127.0.0.1:{port}" in self._logs(name):
                return
            if self._call("inspect", "--format", "{{.State.Running}}", name) != "true":
                break
            time.sleep(0.2)
        fail(f"{name} did not serve within {START_S:g} s")

    def _logs(self, name: str) -> str:
        command = [*self.command, "logs", name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        return done.stdout + done.stderr

    def _call(self, *arguments: str) -> str:
        command = [*self.command, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=False)
        if done.returncode:
            fail(f"{shlex.join(command)} failed: {done.stderr.strip()}")
        return done.stdout.strip()


def git(*arguments: str) -> str:
    """What git says of this repository; empty where there is none."""
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    return done.stdout.strip()


def base_image(service: str, options: Sequence[str]) -> str:
    """The image that a service's is built on: of its Dockerfile, unless the options name another."""
    given = [option.partition("PYTHON_IMAGE=")[2] for option in options if "PYTHON_IMAGE=" in option]
    dockerfile = (ROOT / "docker" / f"{service}.Dockerfile").read_text()
    return (given or re.findall(r"^ARG PYTHON_IMAGE=(\S+)$", dockerfile, re.MULTILINE))[-1]


def provenance(
    service: str, image: dict[str, Any], image_id: str, base: dict[str, Any], options: Sequence[str], begun: datetime
) -> dict[str, Any]:
    """Where an image comes from, as an in-toto statement with SLSA's predicate, not signed.

    `image` and `base` are resource descriptors of in-toto; `begun` is when the build began.
    """
    files = [f"docker/{service}.Dockerfile", f"docker/locks/{service}.txt", "docker/locks/build.txt"]
    sources: list[dict[str, Any]] = [
        {"uri": f"file:{file}", "digest": {"sha256": hashlib.sha256((ROOT / file).read_bytes()).hexdigest()}}
        for file in files
    ]
    sources.append(base)
    sources += [{"uri": "git", "digest": {"gitCommit": commit}} for commit in [git("rev-parse", "HEAD")] if commit]
    parameters = {
        "dockerfile": files[0],
        "options": list(options),
        "has_local_changes": bool(git("status", "--porcelain")),
    }
    return {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": [image],
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": "urn:coppice:make-images",
                "externalParameters": parameters,
                "resolvedDependencies": sources,
            },
            "runDetails": {
                "builder": {"id": "urn:coppice:tests/chart/try_images.py"},
                "metadata": {"startedOn": begun.isoformat(), "finishedOn": datetime.now(UTC).isoformat()},
                # By which a later run recognizes the image.
                "byproducts": [{"name": "image id", "digest": {"sha256": image_id}}],
            },
        },
    }


def subject(engine: Engine, service: str) -> dict[str, Any]:
    """A service's image as a resource descriptor of in-toto."""
    return {"name": engine.image(service), **engine.digest(engine.image(service))}


def write_provenance(engine: Engine, service: str, options: Sequence[str], begun: datetime) -> None:
    """Write the provenance of an image that was just built next to its bill of materials."""
    name, image_id = base_image(service, options), engine.image_id(engine.image(service))
    base = {"uri": f"oci:{name}", **engine.digest(name)}
    told = provenance(service, subject(engine, service), image_id, base, options, begun)
    PROVENANCE.mkdir(parents=True, exist_ok=True)
    _write(service, told)


def renew_provenance(engine: Engine, service: str) -> None:
    """Name an image that was built before by the digest that it has now; that of a registry once it was pushed.

    Of an image that was not built by this script, nothing is known, and nothing is written.
    """
    path = PROVENANCE / f"{service}.provenance.json"
    told: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    built = [one["digest"]["sha256"] for one in told["predicate"]["runDetails"]["byproducts"]] if told else []
    if built != [engine.image_id(engine.image(service))]:
        say(f"{service}: no provenance: `make images` has not built this image here, so its sources are not known")
        return
    _write(service, {**told, "subject": [subject(engine, service)]})


def _write(service: str, told: dict[str, Any]) -> None:
    path = PROVENANCE / f"{service}.provenance.json"
    path.write_text(json.dumps(told, indent=1) + "\n")
    say(f"{service}: {path}, by the digest of its {told['subject'][0]['annotations']['digest_of']}")


def look_at(engine: Engine, service: str) -> None:
    """Check an image's user, writable paths and contents."""
    found = json.loads(engine.output(service, "python", "-c", LOOK))
    wanted = {
        "uid": 65532,
        "writes": ["/tmp/x"],
        "compilers": [],
        "packages": PACKAGES[service],
        "models": MODELS[service],
    }
    if found != wanted:
        fail(f"{service} has {found} instead of {wanted}")
    say(f"{service}: user 65532, writes to /tmp alone, no compiler, no pip, of the large packages {found['packages']}")
    say(f"{service}: the models {found['models']}")


def complete(engine: Engine, address: str, speculation: str, temperature: float) -> dict[str, Any]:
    """One completion, with the command line in the orchestrator's image."""
    request = {
        "--address": address,
        "--prompt": PROMPT,
        "--max-tokens": str(NUM_TOKENS),
        "--temperature": str(temperature),
        "--seed": "1",
        "--speculation": speculation,
    }
    arguments = [part for pair in request.items() for part in pair]
    answer: dict[str, Any] = json.loads(engine.output("orchestrator", "coppice", "generate", "--json", *arguments))
    return answer


def complete_over_http(engine: Engine, addresses: dict[str, str], answered: dict[str, Any]) -> None:
    """The same completion through the gateway, which has to have the same text."""
    port = int(addresses["gateway"].rpartition(":")[2])
    body = {"model": "target", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "temperature": 0, "seed": 1}
    url = f"http://{addresses['gateway']}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with engine.running("gateway", port, ORCHESTRATOR_ADDRESS=addresses["orchestrator"]):
        with urllib.request.urlopen(request, timeout=COMMAND_S) as answer:
            text = json.load(answer)["choices"][0]["text"]
        if text != answered["text"]:
            fail(f"over HTTP the text is {text!r} instead of {answered['text']!r}")
        say("the gateway gives the same text over HTTP")


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def run_topology(engine: Engine) -> None:
    """Run all services, compare outputs with speculation on and off, stop them."""
    ports = {service: free_port() for service in SERVICES}
    addresses = {service: f"127.0.0.1:{port}" for service, port in ports.items()}
    back_ends = {"VERIFIER_ADDRESS": addresses["verifier"], "DRAFTER_ADDRESSES": addresses["drafter"]}
    with (
        engine.running("verifier", ports["verifier"], MODEL="/models/target", THREADS="1") as verifier,
        engine.running("drafter", ports["drafter"], MODEL="/models/small-lm") as drafter,
        engine.running("orchestrator", ports["orchestrator"], REQUIRE_DRAFTERS="true", **back_ends) as orchestrator,
    ):
        complete_over_http(engine, addresses, answered=complete(engine, addresses["orchestrator"], "off", 0.0))
        for temperature in (0.0, 1.0):
            answers = [complete(engine, addresses["orchestrator"], how, temperature) for how in ("off", "small-lm")]
            plain, drafted = answers
            if plain["token_ids"] != drafted["token_ids"]:
                fail(f"at temperature {temperature:g} drafts changed the output")
            if not drafted["speculation"]["accepted_tokens"]:
                fail(f"at temperature {temperature:g} no draft was accepted: {drafted}")
            tau = drafted["speculation"]["mean_acceptance_length"]
            say(f"temperature {temperature:g}: {len(plain['token_ids'])} tokens, the same with drafts, tau {tau:.2f}")
        for name in (orchestrator, drafter, verifier):
            code, took_s = engine.stop(name)
            if code:
                fail(f"{name} stopped with exit code {code}")
            say(f"{name} stopped by itself after {took_s:.1f} s")


def main() -> None:
    """Build, look, run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", default="docker", help="command of the engine, with options that it always needs")
    parser.add_argument("--build-options", default="", help="options for each build")
    parser.add_argument("--run-options", default="", help="options for each container")
    parser.add_argument("--tag", default="try", help="tag of the images")
    parser.add_argument("--no-build", action="store_true", help="take images that are there")
    options = parser.parse_args()
    engine = Engine(tuple(shlex.split(options.engine)), options.tag, tuple(shlex.split(options.run_options)))
    for service in SERVICES:
        if options.no_build:
            renew_provenance(engine, service)
        else:
            begun = datetime.now(UTC)
            engine.build(service, shlex.split(options.build_options))
            write_provenance(engine, service, shlex.split(options.build_options), begun)
        look_at(engine, service)
    run_topology(engine)


if __name__ == "__main__":
    main()
