"""What the token before says of the next one, in a checkpoint whose masks could not know it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel

from coppice.errors import IncompatibleError
from coppice.transition_scores import TransitionScores
from drafter_svc.drafters.layers_checkpoint import LAYERS_FILE, has_layers_alone
from drafter_svc.drafters.tree_cache import FloatArray

_FILE = "model.safetensors"
_NAMES = ("transition.before", "transition.behind")


def load_transition(reference: str, model: PreTrainedModel, num_tokens: int) -> TransitionScores | None:
    """The transition of a checkpoint, for the first `num_tokens` of its vocabulary; None where it has none.

    Its matrices [rank, hidden] act on the model's own embeddings of the token before and of the one behind, all made
    equally large: silu(before . B) times behind . D.

    Raises:
        IncompatibleError: the matrices do not fit the model, or are damaged.
    """
    path = Path(reference) / (LAYERS_FILE if has_layers_alone(reference) else _FILE)
    if not path.is_file():
        return None
    try:
        with safe_open(path, "pt") as file:
            found = set(_NAMES) & set(file.keys())
            if not found:
                return None
            matrices: list[Any] = [file.get_tensor(name).float().numpy() for name in _NAMES]
    except SafetensorError as error:
        raise IncompatibleError(f"the weights of {reference} are damaged: {error}") from error
    embed: Any = model.get_input_embeddings()
    output: Any = model.get_output_embeddings()
    tables = [_even_rows(layer.weight[:num_tokens].detach().float().cpu().numpy()) for layer in (embed, output)]
    sizes = [matrix.shape[1:] for matrix in matrices]
    if sizes != [table.shape[1:] for table in tables] or len(matrices[0]) != len(matrices[1]):
        shapes = " and ".join(str(matrix.shape) for matrix in matrices)
        raise IncompatibleError(f"{reference} has a transition of shapes {shapes}, which does not fit its embeddings")
    before = tables[0] @ matrices[0].T
    return TransitionScores(before / (1 + np.exp(-before)), tables[1] @ matrices[1].T)


def _even_rows(table: FloatArray) -> FloatArray:
    sizes = np.sqrt(np.square(table).mean(-1, keepdims=True))
    rows: FloatArray = table / np.maximum(sizes, np.float32(1e-6))
    return rows
