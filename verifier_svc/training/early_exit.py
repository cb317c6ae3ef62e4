"""`coppice train early-exit`: a head that finds, after an early layer, drafted tokens unlikely under the target.

The target is frozen. The head learns the target's full next-token distributions from the same forward pass, by soft
cross-entropy; a penalty on the log of its sum over the vocabulary makes it self-normalised, so that one token's score
needs no other's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from coppice.checkpoints.writing import whole_directory
from coppice.core.errors import IncompatibleError
from coppice.training.acceptance_report import TEMPERATURES
from coppice.training.checkpoint import write_card
from coppice.training.loop import Schedule, trained
from coppice.training.run import load_target, open_run
from verifier_svc.extras.pruning.head import EarlyHead, predicted_norm, save_head
from verifier_svc.extras.pruning.layers import decoder_layers
from verifier_svc.extras.redraft.adapter import LowRank
from verifier_svc.model.made_for import write_target
from verifier_svc.model.output_layer import OutputLayer, output_layer
from verifier_svc.verify.draw_rule import Threshold, Thresholds


@dataclass(frozen=True, slots=True)
class EarlyExitRecipe:
    """All parameters of a run. The head is applied after the target's first `layer` layers.

    The bundled target mostly knows its token after the fourth of five layers, and hardly after the second.
    """

    layer: int = 4
    rank: int = 128
    steps: int = 400
    rows: int = 6
    length: int = 256
    learning_rate: float = 3e-3
    # Weight of the squared log of the sum over the vocabulary.
    normalising: float = 0.1
    # Windows of held-out text: alternate batches calibrate and report.
    held_out_windows: int = 128
    recall: float = 0.9925
    seed: int = 0


class HeadModule(nn.Module):
    """Trainable early head; initialised with the target's own last norm and a zero addition."""

    def __init__(self, norm: FinalNorm, rank: int, seed: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(norm.weight.clone())
        self.bias = nn.Parameter(norm.bias.clone())
        size = len(norm.weight)
        generator = torch.Generator().manual_seed(seed)
        self.down = nn.Parameter(torch.randn(rank, size, generator=generator) * size**-0.5)
        self.up = nn.Parameter(torch.zeros(size, rank))
        self.is_centred = norm.is_centred
        self.eps = norm.eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Approximation of the last hidden states, from those after the early layer [..., hidden]."""
        rows = predicted_norm(hidden, self.weight, self.bias, is_centred=self.is_centred, eps=self.eps)
        added: Tensor = F.linear(F.silu(F.linear(rows, self.down)), self.up)
        return rows + added

    def head(self, layer: int, thresholds: Thresholds) -> EarlyHead:
        """The head in the verifier's format."""
        low_rank = LowRank(self.down.detach(), self.up.detach())
        return EarlyHead(
            layer, self.weight.detach(), self.bias.detach(), self.is_centred, self.eps, low_rank, thresholds
        )


@dataclass(frozen=True, slots=True)
class FinalNorm:
    """A model's last norm: `weight` and `bias` [hidden], and whether it subtracts the mean."""

    weight: Tensor
    bias: Tensor
    is_centred: bool
    eps: float


@torch.inference_mode()
def final_norm(model: PreTrainedModel) -> FinalNorm:
    """Measure the norm before the output layer on rows of known norm.

    Raises IncompatibleError if there is no such norm.
    """
    inside = {id(module) for module in decoder_layers(model).modules()}
    outside = [module for module in model.base_model.modules() if id(module) not in inside]
    norms = [module for module in outside if "norm" in type(module).__name__.lower()]
    if not norms:
        raise IncompatibleError(f"{type(model).__name__} has no norm after its last layer")
    norm, size = norms[-1], model.config.get_text_config().hidden_size
    # Mean 0 and mean square 1; then mean 1, which a centred norm maps to 0.
    signs = torch.ones(size)
    signs[1::2] = -1
    bias = norm(torch.zeros(1, size))[0]
    weight = (norm(1e3 * signs[None])[0] - bias) * signs
    is_centred = bool((norm(1e3 * torch.ones(1, size))[0] - bias).norm() < 0.5 * weight.norm())
    eps = float(getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 1e-6)
    return FinalNorm(weight.clone(), bias.clone(), is_centred, eps)


class FrozenTarget:
    """Hidden states after an early layer, and logits, of the frozen target in one forward."""

    def __init__(self, model: PreTrainedModel, layer: int) -> None:
        layers = decoder_layers(model)
        if not 1 <= layer < len(layers):
            raise IncompatibleError(f"the head is to act after layer {layer}, the target has {len(layers)}")
        self._model = model.eval().requires_grad_(False)
        self._hidden: list[Tensor] = []
        layers[layer - 1].register_forward_hook(self._keep)

    @torch.no_grad()
    def look(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Hidden states [rows, length, hidden] and logits [rows, length, vocab] of windows [rows, length]."""
        self._hidden.clear()
        logits: Tensor = self._model(input_ids=ids, use_cache=False).logits
        [hidden] = self._hidden
        return hidden, logits

    def _keep(self, _module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
        self._hidden.append(output[0] if isinstance(output, tuple) else output)


def self_normalised_loss(logits: Tensor, target_logits: Tensor, normalising: float) -> Tensor:
    """Mean soft cross-entropy to the target, in nats per token, plus the penalty; both logits are [..., vocab]."""
    log_sums = torch.logsumexp(logits.float(), -1)
    probabilities = target_logits.float().softmax(-1)
    cross_entropy = log_sums - (probabilities * logits.float()).sum(-1)
    return (cross_entropy + normalising * log_sums.square()).mean()


def train_early_exit(roots: Sequence[Path], target_dir: Path, out: Path, recipe: EarlyExitRecipe) -> None:
    """Train, calibrate thresholds on held-out text, and write the head with its card."""
    tokenizer, model = load_target(target_dir, torch.float32)
    store, state_dir = open_run(roots, tokenizer, out, recipe, target=model)
    output, target = output_layer(model), FrozenTarget(model, recipe.layer)
    head = HeadModule(final_norm(model), recipe.rank, recipe.seed)
    held_out = store.held_out_batches(recipe.held_out_windows, recipe.rows, recipe.length)

    def held_out_loss(runner: nn.Module, ids: Tensor) -> Tensor:
        hidden, logits = target.look(ids)
        return self_normalised_loss(output.all_scores(runner(hidden)), logits, recipe.normalising)

    def loss(runner: nn.Module, step: int) -> Tensor:
        return held_out_loss(runner, store.training_batch(recipe.seed, step, recipe.rows, recipe.length))

    schedule = Schedule(recipe.steps, recipe.learning_rate)
    # The head costs next to nothing compared with the target, which is not compiled.
    loop = trained(head, loss, held_out_loss, held_out[:4], schedule, state_dir, use_compiler=False)
    # Calibrated in the precision in which it is saved.
    head.to(torch.bfloat16).to(torch.float32)
    calibrating, reported = (
        collect((_look(ids, head, target, output) for ids in held_out[half::2]), recipe.seed + half) for half in (0, 1)
    )
    thresholds = calibrate(calibrating, recipe.recall)
    parameters = sum(parameter.numel() for parameter in head.parameters())
    extra = described(recipe.layer, recipe.recall, measure(reported, thresholds))
    title = "Early-exit head"
    with whole_directory(out) as whole:
        save_head(head.head(recipe.layer, thresholds), whole)
        write_target(whole, model)
        write_card(whole, title=title, parameters=parameters, recipe=recipe, store=store, loop=loop, extra=extra)


@torch.no_grad()
def _look(ids: Tensor, head: HeadModule, target: FrozenTarget, output: OutputLayer) -> tuple[Tensor, Tensor]:
    """Early scores and the target's logits [rows, vocab]."""
    hidden, logits = target.look(ids)
    return output.all_scores(head(hidden)).flatten(0, 1).float(), logits.flatten(0, 1).float()


# The drawn token, and further ones that stand for a drafter's other children.
CHILDREN = 4

# Of a card, after the facts.
STORY = """
Acts after layer {layer} of the target. Trained on the target's own distributions over the text. The held-out figure
above includes the penalty for not being normalised: it does not compare with that of a language model.

Thresholds are calibrated on one half of held-out windows of text for a recall of {recall}; the rows below are the other
half's. Recall: the share of tokens drawn by the target that are not pruned. Removed: of the {others} tokens that the
target itself ranks below the drawn one, noise included, the share that is pruned. No drafter could have better wrong
children, and so these are the hardest to rule out.

| temperature | threshold | recall | removed |
|---|---|---|---|
{rows}

`early_head.json` has the thresholds.
"""


@dataclass(frozen=True, slots=True)
class Values:
    """Values compared with thresholds: of drawn tokens [N], and of the next children [N, CHILDREN - 1]."""

    drawn: Tensor
    others: Tensor


@dataclass(frozen=True, slots=True)
class HeadMeasurement:
    """Effect of a threshold at its temperature; `removed` is the share of likely but wrong children that it prunes."""

    temperature: float
    threshold: float
    recall: float
    removed: float


def collect(batches: Iterable[tuple[Tensor, Tensor]], seed: int) -> dict[float, Values]:
    """Values by temperature, from batches of early scores and the target's logits of the same rows [rows, vocab]."""
    parts: dict[float, list[Tensor]] = {temperature: [] for temperature in TEMPERATURES}
    for index, (scores, logits) in enumerate(batches):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + index)
        uniform = torch.rand(logits.shape, generator=generator, dtype=torch.float64).clamp(1e-12, 1 - 1e-12)
        noise = (-(-uniform.log()).log()).float()
        for temperature in TEMPERATURES:
            children = (logits + temperature * noise).topk(CHILDREN).indices
            parts[temperature].append((scores + temperature * noise).gather(-1, children))
    joined = {temperature: torch.cat(values) for temperature, values in parts.items()}
    return {temperature: Values(values[:, 0], values[:, 1:]) for temperature, values in joined.items()}


def calibrate(values: Mapping[float, Values], recall: float) -> Thresholds:
    """For each temperature the highest threshold reached by at least a share of `recall` of drawn tokens."""
    thresholds = []
    for temperature, at in values.items():
        drawn = at.drawn.sort().values
        lowest = drawn[int((1 - recall) * len(drawn))]
        thresholds.append(Threshold(temperature, float(lowest), float((drawn >= lowest).double().mean())))
    return tuple(thresholds)


def measure(values: Mapping[float, Values], thresholds: Thresholds) -> list[HeadMeasurement]:
    """Effect of thresholds on values not used for calibration."""
    return [
        HeadMeasurement(
            threshold.temperature,
            threshold.score,
            recall=float((values[threshold.temperature].drawn >= threshold.score).double().mean()),
            removed=float((values[threshold.temperature].others < threshold.score).double().mean()),
        )
        for threshold in thresholds
    ]


def described(layer: int, recall: float, measured: Sequence[HeadMeasurement]) -> str:
    """Text of the card."""
    rows = "\n".join(f"| {m.temperature:g} | {m.threshold:.3f} | {m.recall:.4f} | {m.removed:.3f} |" for m in measured)
    return STORY.format(layer=layer, recall=recall, others=CHILDREN - 1, rows=rows)
