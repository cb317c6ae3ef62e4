"""The keyword under which a forward takes its cache, before and since its renaming."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from coppice.checkpoints.hf_cache import cache_argument


def _before(input_ids: object, past_key_values: object = None) -> None: ...


def _since(input_ids: object, cache: object = None) -> None: ...


def _unstated(**options: object) -> None: ...


@pytest.mark.parametrize(
    ("forward", "name"), [(_before, "past_key_values"), (_since, "cache"), (_unstated, "past_key_values")]
)
def test_the_name_is_the_one_that_the_forward_states(forward: Callable[..., object], name: str) -> None:
    assert cache_argument(forward) == name


def test_the_installed_transformers_takes_it_without_a_warning() -> None:
    """Warnings are errors here; an unknown keyword would be swallowed, and the cache left empty."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    )
    cache = DynamicCache()
    model(input_ids=torch.tensor([[1, 2, 3]]), use_cache=True, **{cache_argument(model.forward): cache})
    assert cache.get_seq_length() == 3
