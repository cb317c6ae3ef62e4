"""Loading a checkpoint's transition: scores of a token given the previous one, which masks lack."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from coppice.checkpoints.loaded_weights import refuse_not_finite, refuse_other_names
from coppice.core.errors import IncompatibleError
from coppice.search.likeliest_tokens import FloatArray
from coppice.search.transition_scores import TransitionScores
from drafter_svc.model.layers_checkpoint import LAYERS_FILE, TRANSITION, has_layers_alone

_FILE = "model.safetensors"


def load_transition(reference: str, model: PreTrainedModel, num_tokens: int) -> TransitionScores | None:
    """Transition of a checkpoint, for the first `num_tokens` of its vocabulary; None without one.

    Raises:
        IncompatibleError: the matrices do not match the model, or are damaged.
    """
    if (matrices := transition_matrices(reference)) is None:
        return None
    embed: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    tables = [layer.weight[:num_tokens].detach().float().cpu().numpy() for layer in (embed, output)]
    try:
        return TransitionScores.of_embeddings(*matrices, *tables)
    except ValueError as error:
        raise IncompatibleError(f"{reference}: {error}") from error


def transition_matrices(reference: str) -> tuple[FloatArray, FloatArray] | None:
    """Matrices [rank, hidden] of a checkpoint's transition; None without one.

    They act on the model's embeddings (`TransitionScores.of_embeddings`).

    Raises:
        IncompatibleError: the matrices are damaged.
    """
    path = Path(reference) / (LAYERS_FILE if has_layers_alone(reference) else _FILE)
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            names = set(TRANSITION) & set(file.keys())
            if not names:
                return None
            refuse_other_names(f"the transition of {reference}", names, TRANSITION)
            tensors = [file.get_tensor(name).float() for name in TRANSITION]
    except SafetensorError as error:
        raise IncompatibleError(f"the weights of {reference} are damaged: {error}") from error
    refuse_not_finite(reference, zip(TRANSITION, tensors, strict=True))
    before, behind = (tensor.numpy() for tensor in tensors)
    return before, behind
