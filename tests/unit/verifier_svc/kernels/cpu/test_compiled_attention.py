"""The compiled attention: right to rounding, and the same bits for a row whatever stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.unit.verifier_svc.oracles import random_tree
from tests.unit.verifier_svc.tiny_engine import VOCAB
from verifier_svc.engine.kv_cache import BLOCK_SIZE, KVCache, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, plan_pass
from verifier_svc.kernels.base import AttentionKernel, AttentionRule, KernelLimitError
from verifier_svc.kernels.cpu import attention as compiled_attention
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.model import loading
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.parallel.tensor_attention import TensorKernel

# Query heads, key heads, head size, value size.
SHAPES = [(4, 2, 16, 16), (8, 4, 64, 64), (4, 4, 20, 12), (5, 1, 9, 9), (6, 2, 8, 8)]


class Text:
    """A sequence's true keys, values and queries, as random functions of the tokens' path, and its cache."""

    def __init__(self, cache: KVCache, shape: tuple[int, int, int, int], seed: int) -> None:
        self.cache = SequenceCache(cache, 1000)
        self.shape = shape
        self.seed = seed
        self.tokens: list[int] = []

    def tensors(self, path: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
        """Query [H, D], key [K, D] and value [K, value size] behind a path."""
        heads, kv_heads, size, value_size = self.shape
        generator = torch.Generator().manual_seed(hash((self.seed, *path)) % 2**62)
        shapes = ((heads, size), (kv_heads, size), (kv_heads, value_size))
        query, key, value = (torch.randn(shape, generator=generator) for shape in shapes)
        return query, key, value


class Pass:
    """One pass over several sequences, on any number of kernels."""

    def __init__(self, cache: KVCache, work: Sequence[tuple[Text, list[int], TokenTree]]) -> None:
        self.work = work
        rows = [SequenceRows(sequence.cache, pending, tree) for sequence, pending, tree in work]
        self.plan = plan_pass(rows, row_multiple=4)
        self.moves = cache.take_moves()
        columns = [
            sequence.tensors(path)
            for sequence, pending, tree in work
            for path in (
                *(sequence.tokens + pending[: last + 1] for last in range(len(pending))),
                *(sequence.tokens + pending + list(nodes) for nodes in tree.paths()),
            )
        ]
        padding = len(self.plan.token_ids) - len(columns)
        columns += [tuple(torch.zeros_like(part) for part in columns[0])] * padding  # type: ignore[list-item]
        self.query, self.key, self.value = (torch.stack(parts, 1) for parts in zip(*columns, strict=True))

    def run(self, kernel: AttentionKernel, rule: AttentionRule) -> Tensor:
        """Outputs of the rows that are not padding [rows, H, value size]."""
        kernel.begin(self.plan, *self.moves)
        return kernel.attend(0, self.query, self.key, self.value, rule)[: self.plan.num_rows]

    def keep(self, index: int, node: int) -> None:
        """Commit a path of one sequence's tree."""
        sequence, pending, tree = self.work[index]
        path = tree.path(node) if node >= 0 else ()
        sequence.cache.keep([*range(len(pending)), *(len(pending) + step for step in path)])
        sequence.tokens += [*pending, *(tree.token_ids[step] for step in path)]


def new_kernel(num_blocks: int) -> CompiledKernel:
    kernel = CompiledKernel()
    kernel.allocate(num_blocks)
    return kernel


@pytest.mark.parametrize("window", [None, 24, 70, 130])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_are_those_of_attention_in_double_precision(
    shape: tuple[int, int, int, int], window: int | None
) -> None:
    cache = KVCache(32)
    compiled, tensors = new_kernel(32), TensorKernel(torch.device("cpu"), exact=True)
    tensors.allocate(32)
    generator = np.random.default_rng(1)
    sequences = [Text(cache, shape, seed) for seed in range(3)]
    rule = AttentionRule(shape[2] ** -0.5, window)
    for step in range(5):
        pending = [
            [int(t) for t in generator.integers(0, VOCAB, size)] for size in ((90, 3, 61) if step == 0 else (1,) * 3)
        ]
        trees = [random_tree(generator, VOCAB, int(size)) for size in generator.integers(1, 14, 3)]
        one = Pass(cache, list(zip(sequences, pending, trees, strict=True)))
        assert torch.allclose(one.run(compiled, rule), one.run(tensors, rule), atol=3e-6)
        for index, tree in enumerate(trees):
            one.keep(index, int(generator.integers(-1, len(tree))))
    assert compiled.bytes_per_slot == 4 * shape[1] * (shape[2] + shape[3]) == tensors.bytes_per_slot


@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("seed", range(4))
def test_a_rows_bits_do_not_depend_on_its_company(seed: int, window: int | None) -> None:
    """One text three ways: token by token, prompt at once, and through random trees among other sequences."""
    shape = SHAPES[seed]
    generator = np.random.default_rng(seed)
    text = [int(token) for token in generator.integers(0, VOCAB, 3 * BLOCK_SIZE)]
    rule = AttentionRule(shape[2] ** -0.5, window)
    alone = decode(text, shape, rule, 1)
    assert torch.equal(decode(text, shape, rule, len(text)), alone)
    assert torch.equal(decode(text, shape, rule, 7), alone)

    cache, kernel = KVCache(64), new_kernel(64)
    sequence, others = Text(cache, shape, 0), [Text(cache, shape, 9 + number) for number in range(3)]
    outputs: list[Tensor] = []
    while len(outputs) < len(text):
        done = len(outputs)
        first = int(generator.integers(1, 6))
        pending = text[done : done + first]
        tree, path = tree_with(generator, text[done + first : done + first + 5])
        company = [(other, [1], random_tree(generator, VOCAB, int(generator.integers(1, 9)))) for other in others]
        place = int(generator.integers(0, 4))
        work = [*company[:place], (sequence, pending, tree), *company[place:]]
        one = Pass(cache, work)
        start = one.plan.segments[place].start
        rows = one.run(kernel, rule)
        for index in range(len(work)):
            one.keep(index, (path[-1] if path else -1) if index == place else 0)
        outputs += [rows[start + row] for row in (*range(len(pending)), *(len(pending) + node for node in path))]
        if generator.random() < 0.2:
            others[0].cache.release()
            others[0].tokens.clear()
    assert torch.equal(torch.stack(outputs), alone)


def decode(text: list[int], shape: tuple[int, int, int, int], rule: AttentionRule, chunk: int) -> Tensor:
    """Outputs of all tokens, `chunk` at a time, in a cache of their own."""
    cache, kernel = KVCache(8), new_kernel(8)
    sequence = Text(cache, shape, 0)
    outputs = []
    for start in range(0, len(text), chunk):
        one = Pass(cache, [(sequence, text[start : start + chunk], EMPTY_TREE)])
        outputs.append(one.run(kernel, rule))
        one.keep(0, -1)
    return torch.cat(outputs)


def tree_with(generator: np.random.Generator, path: Sequence[int]) -> tuple[TokenTree, list[int]]:
    """A tree that holds `path` among decoys, and the path's nodes."""
    tokens: list[int] = []
    parents: list[int] = []
    nodes: list[int] = []
    for token in path:
        above = nodes[-1] if nodes else -1
        for decoy in range(int(generator.integers(0, 3))):
            tokens.append(VOCAB + 3 * len(tokens) + decoy)
            parents.append(above)
        nodes.append(len(tokens))
        tokens.append(token)
        parents.append(above)
    return TokenTree(tuple(tokens), tuple(parents), (0.0,) * len(tokens)), nodes


def test_heads_on_several_threads_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    text = [int(token) for token in np.random.default_rng(0).integers(0, VOCAB, 100)]
    rule = AttentionRule(0.25)
    one = decode(text, SHAPES[0], rule, 100)
    monkeypatch.setattr(compiled_attention, "_WORTH_THREADS", 0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert torch.equal(decode(text, SHAPES[0], rule, 100), one)


@pytest.mark.parametrize("rule", [AttentionRule(1.0, softcap=30.0), AttentionRule(1.0, sinks=torch.zeros(4))])
def test_rules_that_it_does_not_know_are_refused(rule: AttentionRule) -> None:
    cache = KVCache(2)
    one = Pass(cache, [(Text(cache, SHAPES[0], 0), [1, 2], EMPTY_TREE)])
    with pytest.raises(KernelLimitError, match="soft caps"):
        one.run(new_kernel(2), rule)


def test_a_model_that_it_does_not_suit_gets_tensor_operations(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.3,
    )
    model: PreTrainedModel = Gemma2ForCausalLM(config).eval()
    probe = ConformanceProbe(model, VOCAB)
    with caplog.at_level("INFO"):
        target = loading.probed(model, probe, exact=True, threads=None)
    assert "attention is not compiled: the compiled kernel supports neither soft caps" in caplog.text
    assert probe.check(target) < 1e-3


def test_half_precision_gets_tensor_operations(new_model: Callable[[str], PreTrainedModel]) -> None:
    assert isinstance(loading.compiled_kernel(new_model("llama")), CompiledKernel)
    assert loading.compiled_kernel(new_model("llama").to(torch.bfloat16)) is None  # type: ignore[arg-type]
