"""The stages of `coppice adapt`: text with states, training, measurement, checkpoint.

Each goes on where it was interrupted.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.adapt.answer_store import AnswerStore, is_held_out, read_texts, shards, write_shard
from coppice.adapt.eagle_checkpoint import read_head, save_head
from coppice.adapt.eagle_head import check_form
from coppice.adapt.eagle_measure import measure_head
from coppice.adapt.eagle_run import EagleRecipe, TrainedHead, train_head
from coppice.adapt.own_text import GivenPrompt, OwnWriter, TextShape, WrittenText
from coppice.checkpoints.catalogue import local_model
from coppice.checkpoints.writing import whole_directory, whole_file
from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import default_feature_layers
from coppice.training.run import load_target
from coppice.training.state import open_state
from coppice.version import VERSION
from verifier_svc.app import new_servicer
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.engine import Engine
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.target_model import TargetInfo

logger = logging.getLogger(__name__)

_TEXTS_PER_SHARD = 128
_HELD_OUT_WINDOWS = 24


@dataclass(frozen=True, slots=True)
class AdaptPlan:
    """A run: `tokens` of answers of a target, to its own turns or to `prompts`, and a head by `recipe`."""

    target: str
    tokens: int
    seed: int
    recipe: EagleRecipe
    shape: TextShape = field(default_factory=TextShape)
    prompts: tuple[GivenPrompt, ...] = ()

    @property
    def made_from(self) -> dict[str, str]:
        """Digests of what else decides the answers."""
        if not self.prompts:
            return {}
        content = json.dumps([[prompt.text, prompt.is_turn] for prompt in self.prompts])
        return {"prompts": hashlib.sha256(content.encode()).hexdigest()[:16]}


@dataclass(frozen=True, slots=True)
class _TextRecipe:
    """Settings that decide the answers, which must not change while answers are added."""

    target: str
    seed: int
    shape: TextShape


def run_plan(plan: AdaptPlan, out: Path, *, use_compiler: bool = True) -> None:
    """Make an EAGLE-3 head for a target in `out`; unfinished work lies in `out` with ".state".

    With more tokens than before, answers are added, and training begins with the head that is in `out`.

    Raises:
        IncompatibleError: the target cannot be used, its layers give no states, or the work or the head there is
            another run's.
        OSError: files cannot be written.
    """
    directory = local_model(plan.target, logger.info)
    work = open_state(out, _TextRecipe(plan.target, plan.seed, plan.shape), plan.made_from)
    text_dir = work / "text"
    text_dir.mkdir(exist_ok=True)
    fingerprint, begun_with = _write_text(plan, directory, text_dir, out)
    _, model = load_target(Path(directory))
    state_dir = open_state(work / f"head-{plan.tokens}", plan.recipe, {})
    trained = train_head(model, text_dir, state_dir, plan.recipe, begun_with, use_compiler=use_compiler)
    _save(plan, model, trained, text_dir, fingerprint, out)


def _write_text(plan: AdaptPlan, directory: str, text_dir: Path, out: Path) -> tuple[str, dict[str, Tensor] | None]:
    """Write answers until there are enough; returns the fingerprint of the target's weights, and the head in `out`.

    Raises:
        IncompatibleError: the target is another one than the answers or the head are from.
    """
    written = sum(len(text.answer) for shard in shards(text_dir) for text in read_texts(shard))
    with _engine(directory, plan.shape.at_once) as (engine, info):
        fingerprint = info.weights_fingerprint
        _check_same_target(text_dir / "target.json", fingerprint)
        head = read_head(out, fingerprint) if out.exists() else None
        if written >= plan.tokens:
            return fingerprint, head
        writer = OwnWriter(engine, info, plan.seed, plan.shape, plan.prompts, wants_features=True)
        taken = {text.number for shard in shards(text_dir) for text in read_texts(shard)}
        first = max(taken, default=-1) + 1
        started_s, begun_with, texts = time.monotonic(), written, list[WrittenText]()
        for text in writer.write(iter(range(first, sys.maxsize))):
            texts += [text] if text.answer else []
            written += len(text.answer)
            if len(texts) == _TEXTS_PER_SHARD or written >= plan.tokens:
                write_shard(texts, info.hidden_size, text_dir / f"text-{len(shards(text_dir)):05}")
                texts = []
                pace = (written - begun_with) / (time.monotonic() - started_s)
                left = max(0, plan.tokens - written) / pace
                logger.info(
                    "%d of %d tokens written, %.0f a second, %.0f minutes left", written, plan.tokens, pace, left / 60
                )
            if written >= plan.tokens:
                break
        return fingerprint, head


def _check_same_target(path: Path, fingerprint: str) -> None:
    """Note whose answers there are, or refuse to add another target's."""
    if not path.exists():
        with whole_file(path) as file:
            file.write(json.dumps({"fingerprint": fingerprint}).encode())
    elif (found := json.loads(path.read_text())["fingerprint"]) != fingerprint:
        raise IncompatibleError(
            f"the answers in {path.parent} are those of a target with weights {found}, and this one has {fingerprint}; "
            f"delete {path.parents[1]} to start anew"
        )


@contextlib.contextmanager
def _engine(directory: str, at_once: int) -> Iterator[tuple[Engine, TargetInfo]]:
    """A running engine of the target that keeps the states which a head is trained on."""
    config = VerifierConfig(model=directory, max_sequences=at_once, prompt_lookup="off", listen_address="127.0.0.1:0")
    target, info = load_probed_target(config)
    check_form(target.model)
    if not info.feature_layers:
        raise IncompatibleError(f"{directory} gives no hidden states of its layers, which a head reads")
    target.show_layers((*info.feature_layers, target.model.config.get_text_config().num_hidden_layers))
    engine, _ = new_servicer(config, target, info)
    engine.start()
    try:
        yield engine, info
    finally:
        engine.stop()


def _save(
    plan: AdaptPlan, model: PreTrainedModel, trained: TrainedHead, text_dir: Path, fingerprint: str, out: Path
) -> None:
    windows = AnswerStore.open(text_dir, held_out=True).first_windows(_HELD_OUT_WINDOWS, plan.recipe.length)
    report = measure_head(trained.head, trained.loss, windows, plan.recipe.test_steps)
    tokens = sum(len(t.answer) for shard in shards(text_dir) for t in read_texts(shard) if not is_held_out(t.number))
    facts = {
        "target": Path(plan.target).name,
        "fingerprint": fingerprint,
        "tokens": tokens,
        "steps": int(trained.curve[-1]["step"]),
        "loss": trained.curve[-1]["held_out"],
        "minutes": trained.curve[-1]["seconds"] / 60,
        "command": "coppice " + shlex.join(sys.argv[1:]),
        "seed": plan.seed,
        **plan.made_from,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, coppice {VERSION}",
        "date": datetime.datetime.now(tz=datetime.UTC).date().isoformat(),
        "recipe": asdict(plan.recipe),
        "curve": trained.curve,
    }
    layers = default_feature_layers(model.config.get_text_config().num_hidden_layers)
    with whole_directory(out) as whole:
        save_head(trained.head, trained.draft_ids, layers, report, whole, facts=facts)
    logger.info("%s is written:\n%s", out, report.table())


def set_threads(threads: int) -> None:
    """Threads of training; 0 leaves torch's choice."""
    if threads:
        torch.set_num_threads(threads)
