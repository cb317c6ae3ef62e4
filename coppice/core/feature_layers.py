"""Layers of a target whose hidden states are its features: low, middle and high ones, as in EAGLE-3 (2503.01840)."""

from __future__ import annotations

# Most tokens of a prompt, the last ones, whose features are sent.
MOST_PROMPT_FEATURES = 512


def default_feature_layers(num_layers: int) -> tuple[int, int, int]:
    """Layers 2, L / 2 and L - 3 of `num_layers`, in order; fewer layers than six give some of them twice.

    State k is that after k decoder layers, the input of layer k.

    Raises:
        ValueError: there is no layer.
    """
    if num_layers < 1:
        raise ValueError(f"a model has at least one layer, got {num_layers}")
    middle = num_layers // 2
    return min(2, middle), middle, max(num_layers - 3, middle)
