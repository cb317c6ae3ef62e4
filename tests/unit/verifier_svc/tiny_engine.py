"""A real engine over a tiny random model, and what drafts for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from transformers import PreTrainedModel

from coppice.core.sampling import SamplingParams
from coppice.core.tokenizer import fingerprint
from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.unit.verifier_svc.oracles import tree_around
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.few_row_products import prefer_panels
from verifier_svc.kernels.cpu.packed_layers import pack_linears, packed_layers
from verifier_svc.model.target_model import TargetInfo, TargetModel

VOCAB = 97
EOS = 2
CONTEXT = 200
LIMITS = SchedulerLimits(max_sequences=8, max_queued=16, prefill_chunk=32)
PROMPTS = [list(range(10, 15)), list(range(20, 90)), [7], list(range(40, 60))]

SAMPLING = {
    "greedy": SamplingParams(),
    "T=0.7 top_p": SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    "T=1 top_k": SamplingParams(temperature=1.0, top_k=20, seed=2),
    "T=1 penalties": SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=3),
}


def character_tokenizer() -> bytes:
    """A tokenizer whose token i is the character with code 32 + i."""
    from tokenizers import Tokenizer, decoders, models

    vocab = {chr(32 + index): index for index in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=chr(32)))
    tokenizer.decoder = decoders.Fuse()
    return tokenizer.to_str().encode()


def tiny_target(model: PreTrainedModel) -> TargetModel:
    """A target with a cache that is soon full."""
    pack_linears(model)
    return TargetModel(model, exact=True, num_blocks=60, kernel=CompiledKernel())


def tiny_target_with_panels(model: PreTrainedModel) -> TargetModel:
    """The same with weights that bfloat16 holds, whose products of up to 20 rows all come from panels."""
    target = tiny_target(model.bfloat16().float())
    num_layers = prefer_panels(target.model, lambda _: None, lambda *_: 20)
    assert num_layers == len(packed_layers(target.model)), "what is to be tested is there"
    return target


def tiny_info() -> TargetInfo:
    """What is said of a tiny target."""
    tokenizer = character_tokenizer()
    return TargetInfo(
        name="tiny",
        tokenizer_json=tokenizer,
        tokenizer_fingerprint=fingerprint(tokenizer),
        vocab_size=VOCAB,
        hidden_size=64,
        max_context_tokens=CONTEXT,
        eos_token_ids=(EOS,),
        exact=True,
    )


def tiny_engine(model: PreTrainedModel) -> Engine:
    """An engine that was not started."""
    return Engine(tiny_target(model), tiny_info(), LIMITS, max_nodes=16)


def oracle_drafter(outputs: Sequence[Sequence[int]], seed: int) -> Callable[..., TokenTree | None]:
    """Drafts the true continuation among decoys, sometimes nothing, sometimes nonsense."""
    generator = np.random.default_rng(seed)

    def draft(index: int, generated: Sequence[int], base: int) -> TokenTree | None:
        kind = generator.integers(6)
        if kind == 0:
            return EMPTY_TREE
        # Longer than a round accepts at times: what is left over serves the next round.
        path = outputs[index][len(generated) :][: int(generator.integers(1, 12))]
        if kind == 1:
            path = [(token + 1) % VOCAB for token in path]
        return tree_around(generator, path, VOCAB, num_decoys=2)

    return draft
