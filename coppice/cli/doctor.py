"""`coppice doctor`: what this machine has, and what of it would be slow or refused."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import shutil
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import SplitResult, unquote, urlsplit

import typer

from coppice.checkpoints.bundled import MODELS
from coppice.checkpoints.catalogue import cache_directory
from coppice.cli.child import ChildError
from coppice.cli.errors import EXTRAS, FAILED, missing_extra
from coppice.cli.topology import refuse_taken
from coppice.kernels.cpu.huge_pages import ASKING, MODE_FILE
from coppice.memory_limit import LEAST_MIB, memory_limit_mib
from coppice.version import VERSION

GIB = 1 << 30
# A target, a drafter and what they compile; of the bundled models.
NEEDED_MEMORY_GIB = 3.0
NEEDED_DISK_GIB = 1.0
BUSY_LOAD_PER_CORE = 0.5
ANSWER_S = 1.0
REDIS_URL = "redis://127.0.0.1:6379/0"
# Ports of the documents' examples, which `coppice up` takes where it is told to, and the options for it.
USUAL_PORTS = {50050: "--port", 8000: "--http-port"}

PROCESSORS, MEMORY = Path("/proc/cpuinfo"), Path("/proc/meminfo")
DRIVER = Path("/proc/driver/nvidia/version")

State = Literal["ok", "slow", "refused", "off"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at. `refused`: nothing is served without it; `off`: a feature that is not there."""

    what: str
    state: State
    found: str
    # Empty where there is nothing to do.
    advice: str = ""


def doctor(
    port: Annotated[
        list[int] | None, typer.Option(min=0, max=65535, help="A further port that must be free; repeatable.")
    ] = None,
    redis: Annotated[str, typer.Option(envvar="REDIS_URL", help="Redis that is wanted.")] = REDIS_URL,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Check this machine: processor, memory, threads, huge pages, disk, ports, Redis, GPU, versions.

    Exit code 1 where `coppice up` would be refused.
    """
    found = [*packages(), *processor(), *memory(), *disk(), *ports(port or []), redis_at(redis), gpu()]
    if as_json:
        typer.echo(json.dumps([asdict(one) for one in found]))
    else:
        for one in found:
            typer.echo(f"{one.state:8} {one.what:12} {one.found}{f'; {one.advice}' if one.advice else ''}")
    if any(one.state == "refused" for one in found):
        raise typer.Exit(FAILED)


def packages() -> Iterator[Finding]:
    """Versions, and the extras that are not installed."""
    versions = [f"coppice {VERSION}", f"Python {platform.python_version()}"]
    for name in ("grpcio", "torch", "transformers", "numba"):
        if importlib.util.find_spec({"grpcio": "grpc"}.get(name, name)):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    yield Finding("versions", "ok", ", ".join(versions))
    for extra, modules in EXTRAS.items():
        if missing := [module for module in modules if importlib.util.find_spec(module) is None]:
            yield Finding(extra, "refused" if extra == "drafter" else "off", missing_extra(extra, missing[0]))
    if not (MODELS / "target").is_dir():
        yield Finding("models", "off", f"no bundled models in {MODELS}", "set COPPICE_MODELS, or give --target")


def processor() -> Iterator[Finding]:
    """Cores, threads and instructions."""
    from coppice.lab.bench.environment import describe_machine

    machine = describe_machine()
    cores, load = machine["usable_cores"], machine["load_average_1m"]
    threads = os.environ.get("OMP_NUM_THREADS", "")
    yield Finding("processor", "ok" if cores > 1 else "slow", f"{machine['cpu']}, {cores} usable cores")
    if load > BUSY_LOAD_PER_CORE * cores:
        yield Finding("load", "slow", f"{load:.1f} processes on {cores} cores already", "measure when it is idle")
    if threads.isdecimal() and int(threads) < cores:
        yield Finding("threads", "slow", f"OMP_NUM_THREADS={threads}, of {cores} cores", "unset it, or give --threads")
    features = set(next(_lines(PROCESSORS, "flags"), "").split())
    if not features:
        yield Finding("instructions", "ok", f"{platform.machine()}: not known before a start")
        return
    for flag, what in (
        ("avx512f", "compiled layers and samplers"),
        ("avx512_bf16", "bfloat16 products of the target"),
        ("avx512_vnni", "8-bit products of drafters"),
    ):
        state: State = "ok" if flag in features else "slow"
        yield Finding("instructions", state, f"{'has' if state == 'ok' else 'no'} {flag}, for {what}")
    if "amx_bf16" not in features:
        yield Finding("instructions", "slow", "no amx_bf16, for products in tiles")
    elif has_tiles():
        yield Finding("instructions", "ok", "has amx_bf16, for products in tiles")
    else:
        yield Finding("instructions", "slow", "has amx_bf16, which the system does not let processes use")


def has_tiles() -> bool:
    """Whether services multiply in AMX's tiles."""
    if importlib.util.find_spec("llvmlite") is None:
        return False
    from coppice.kernels.cpu.amx import MULTIPLIES_TILES

    return MULTIPLIES_TILES


def memory() -> Iterator[Finding]:
    """Memory that is allowed and free, and its pages."""
    limit_mib = memory_limit_mib()
    if limit_mib < LEAST_MIB:
        advice = f"a model needs at least {LEAST_MIB} MiB: raise the container's limit, or `ulimit -d`"
        yield Finding("memory", "refused", f"{limit_mib:.0f} MiB are allowed", advice)
    kib = next(_lines(MEMORY, "MemAvailable"), "").split()
    if kib:
        free = min(int(kib[0]) / 1024, limit_mib) / 1024
        state: State = "ok" if free >= NEEDED_MEMORY_GIB else "slow"
        advice = "" if state == "ok" else f"the bundled models take about {NEEDED_MEMORY_GIB:g} GiB"
        limit = "" if math.isinf(limit_mib) else f", by a limit of {limit_mib / 1024:.1f} GiB"
        yield Finding("memory", state, f"{free:.1f} GiB available{limit}", advice)
    if MODE_FILE.is_file():
        mode = MODE_FILE.read_text().strip()
        good = ASKING in mode or "[always]" in mode
        advice = "" if good else f"echo madvise > {MODE_FILE}"
        yield Finding("huge pages", "ok" if good else "slow", mode, advice)


def disk() -> Iterator[Finding]:
    """Room for converted models and compiled code."""
    place = cache_directory()
    existing = next(path for path in (place, *place.parents) if path.is_dir())
    free = shutil.disk_usage(existing).free / GIB
    if not os.access(existing, os.W_OK):
        yield Finding("disk", "slow", f"{place} cannot be written", "set COPPICE_CACHE")
    elif free < NEEDED_DISK_GIB:
        yield Finding("disk", "slow", f"{free:.1f} GiB free at {place}", "set COPPICE_CACHE to another disk")
    else:
        yield Finding("disk", "ok", f"{free:.0f} GiB free at {place}")


def ports(wanted: list[int]) -> Iterator[Finding]:
    """Whether ports can be listened at: those that are wanted, or else the usual ones, without which services do."""
    for port in wanted or USUAL_PORTS:
        try:
            refuse_taken(port)
        except ChildError as error:
            if wanted:
                yield Finding("port", "refused", str(error))
            else:
                yield Finding("port", "slow", str(error), f"it concerns {USUAL_PORTS[port]} {port} alone")
        else:
            yield Finding("port", "ok", f"{port} is free")


def redis_at(url: str) -> Finding:
    """Whether a Redis answers, which keeps the prefix cache beyond the orchestrator's life.

    Raises typer.BadParameter if it is no URL of one.
    """
    from orchestrator.config import REDIS_SCHEMES

    place = urlsplit(url)
    try:
        host, port = place.hostname or "", place.port or 6379
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--redis") from error
    if not url.startswith(REDIS_SCHEMES) or not (host or place.scheme == "unix"):
        raise typer.BadParameter(f"must be a URL as in {REDIS_URL}, got {url!r}", param_hint="--redis")
    if place.scheme == "unix":
        return Finding("Redis", "off", f"{url} is not asked, only addresses are")
    try:
        with socket.create_connection((host, port), ANSWER_S) as connection:
            connection.settimeout(ANSWER_S)
            connection.sendall(_authentication(place) + b"PING\r\n")
            answer = connection.recv(1024)
    except OSError as error:
        why = error.strerror or error
        return Finding("Redis", "off", f"{host}:{port}: {why}", "the prefix cache stays in the orchestrator's memory")
    said = f"{host}:{port} answers {answer.decode(errors='replace').strip()[:40]!r}"
    if answer.startswith(b"-") and b"+PONG" not in answer:
        return Finding("Redis", "off", said, "its URL is redis://[USER]:PASSWORD@HOST:PORT/0 where it wants a password")
    # +PONG, or TLS, which answers otherwise.
    return Finding("Redis", "ok", said)


def _authentication(place: SplitResult) -> bytes:
    """The command with which a client of a URL with a password begins."""
    words = [b"AUTH", *(unquote(word).encode() for word in (place.username, place.password) if word)]
    if not place.password:
        return b""
    return b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in words)


def gpu() -> Finding:
    """Whether torch finds a CUDA device."""
    driver = DRIVER.is_file()
    if importlib.util.find_spec("torch") is None:
        return Finding("GPU", "off", "torch is not installed")
    import torch

    if torch.cuda.is_available():
        return Finding("GPU", "ok", torch.cuda.get_device_name())
    if driver:
        build = f"torch {torch.__version__} finds none of the driver's devices"
        return Finding("GPU", "slow", build, "install a CUDA build of torch that fits the driver")
    return Finding("GPU", "off", "none: DEVICE is cpu")


def _lines(path: Path, name: str) -> Iterator[str]:
    """Values of a name in a file of `name: value` lines; none where there is no file."""
    for line in path.read_text().splitlines() if path.is_file() else ():
        if line.partition(":")[0].strip() == name:
            yield line.partition(":")[2].strip()
