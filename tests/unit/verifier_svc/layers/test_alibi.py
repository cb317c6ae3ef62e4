"""Falcon's biases are rounded as in transformers, at positions where that is another number."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import FalconConfig, FalconForCausalLM

from tests.unit.verifier_svc.oracles import plain_logits
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.kernels import base
from verifier_svc.layers import alibi
from verifier_svc.model.target_model import TargetModel

VOCAB, TOKENS = 50, 600


def falcon() -> FalconForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": VOCAB, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
    kind = {"alibi": True, "multi_query": False, "parallel_attn": False, "ffn_hidden_size": 64}
    return FalconForCausalLM(FalconConfig(**sizes, **kind, initializer_range=0.3)).eval()


def last_logits(tokens: list[int]) -> Tensor:
    """Of a prompt in two parts."""
    target = TargetModel(falcon(), exact=True, num_blocks=64)
    cache = SequenceCache(target.cache, TOKENS)
    target.forward(target.plan([SequenceRows(cache, tokens[:400], wants_logits=False)]))
    cache.keep(range(400))
    return target.forward(target.plan([SequenceRows(cache, tokens[400:])]))[0]


def test_logits_are_those_of_transformers_and_are_not_without_the_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = torch.randint(VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    expected = plain_logits(falcon(), tokens)
    assert torch.allclose(last_logits(tokens), expected, atol=1e-3)

    def exact(scale: float, slopes: Tensor | None = None, **_: bool) -> base.AttentionRule:
        return base.AttentionRule(scale, slopes=None if slopes is None else slopes * scale)

    monkeypatch.setattr(alibi, "AttentionRule", exact)
    assert not torch.allclose(last_logits(tokens), expected, atol=1e-3)
