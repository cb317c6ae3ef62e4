"""Tokens of a pass's rows against their definition in NumPy, and what drawing them takes."""

from __future__ import annotations

import copy
import random
import tracemalloc
from typing import Any

import numpy as np
import pytest

from coppice.core.sampling import SamplingParams
from coppice.core.tree import EMPTY_TREE, ROOT, TokenTree
from tests.oracles.cut_edges import is_near_tie_of
from tests.oracles.numpy_chooser import NumpyChooser
from tests.unit.verifier_svc.oracles import tree_around
from verifier_svc.verify.sampler import RowTable
from verifier_svc.verify.token_choice import TokenChooser

# Less than a block of the sampler, one, a bit more, and several.
VOCABS = (7, 511, 512, 513, 3000)
ROWS = {
    "normal": lambda generator, vocab: generator.standard_normal(vocab) * generator.choice([0.1, 1, 3, 10]),
    "a few values": lambda generator, vocab: np.round(generator.standard_normal(vocab)),
    "all equal": lambda generator, vocab: np.zeros(vocab),
    "forbidden": lambda generator, vocab: np.where(generator.random(vocab) < 0.5, -np.inf, generator.random(vocab)),
    "falling": lambda generator, vocab: np.sort(generator.standard_normal(vocab))[::-1],
    "rising": lambda generator, vocab: np.sort(generator.standard_normal(vocab)) * 4,
    "nothing": lambda generator, vocab: np.full(vocab, -np.inf),
}


def some_params(chance: random.Random, vocab: int) -> SamplingParams:
    def some(values: list[Any], default: Any) -> Any:
        return chance.choice(values) if chance.random() < 0.4 else default

    def tokens(most: int) -> tuple[int, ...]:
        return tuple(chance.sample(range(vocab), min(vocab, chance.randint(1, most))))

    return SamplingParams(
        temperature=chance.choice([0.0, 1.0, 1.0, 0.3, 2.0, 0.01, 1e-6, 50.0]),
        top_k=some([1, 2, 5, 50, vocab - 1, vocab, vocab + 3], 0),
        top_p=some([0.5, 0.9, 0.99, 0.1, 1e-6, 0.75, 0.999999], 1.0),
        min_p=some([0.1, 0.5, 1.0, 0.001], 0.0),
        repetition_penalty=some([0.7, 1.3], 1.0),
        presence_penalty=some([-0.6, 1.1], 0.0),
        frequency_penalty=some([-0.4, 0.7], 0.0),
        logit_bias={token: chance.uniform(-5, 5) for token in some([tokens(9)], ())},
        allowed_token_ids=some([tokens(30)], ()),
        bad_token_ids=some([tokens(20)], ()),
        seed=chance.getrandbits(64),
    )


def some_choosers(chance: random.Random, vocab: int) -> tuple[NumpyChooser, TokenChooser]:
    """The definition and what serves, of one sequence."""
    params = some_params(chance, vocab)
    few = min(vocab, 12)
    settings: dict[str, Any] = {
        "prompt": [chance.randrange(few) for _ in range(5)],
        "output": [chance.randrange(few) for _ in range(3)],
        "end_token_ids": [1, 2],
        "min_tokens": chance.choice([0, 4, 5, 9]),
    }
    gap = chance.choice([0.0, 0.01, 0.3])
    return NumpyChooser(params, vocab, **settings), TokenChooser(params, vocab, **settings, near_tie_gap=gap)


def is_counted(defined: NumpyChooser, logits: np.ndarray, position: int, gap: float) -> bool:
    return gap > 0 and is_near_tie_of(defined, logits, position, gap)


@pytest.mark.parametrize("kind", ROWS)
@pytest.mark.parametrize("vocab", VOCABS)
def test_a_token_is_the_one_that_its_definition_says(vocab: int, kind: str) -> None:
    generator = np.random.default_rng(vocab)
    num_near_ties = 0
    for number in range(60):
        chance = random.Random(1000 * vocab + number)
        defined, served = some_choosers(chance, vocab)
        logits = np.ascontiguousarray(ROWS[kind](generator, vocab), np.float32)
        for _ in range(2):
            position = chance.randrange(2**33)
            with np.errstate(invalid="ignore"):
                expected = defined.choose(logits, position)
            assert served.choose(logits, position) == expected
            with np.errstate(invalid="ignore"):
                is_near_tie = is_counted(defined, logits, position, served.near_tie_gap)
            assert served.take_near_ties() == is_near_tie
            num_near_ties += is_near_tie
            defined.push(expected)
            served.push(expected)
    if kind == "a few values":
        assert num_near_ties > 0


def nodes_to(tree: TokenTree, node: int) -> list[int]:
    nodes: list[int] = []
    while node != ROOT:
        nodes.insert(0, node)
        node = tree.parents[node]
    return nodes


def path_to(tree: TokenTree, node: int) -> list[int]:
    return [tree.token_ids[step] for step in nodes_to(tree, node)]


@pytest.mark.parametrize("block", [1000, 5])
def test_all_rows_of_a_pass_are_drawn_with_their_own_histories(block: int) -> None:
    vocab = 600
    generator = np.random.default_rng(3)
    table = RowTable()
    logits: list[np.ndarray] = []
    expected: list[list[int]] = []
    trees: list[tuple[int, TokenTree]] = []
    for number in range(60):
        chance = random.Random(number)
        defined, served = some_choosers(chance, vocab)
        # Few tokens, so that paths have some that the history has, and some twice.
        path = [chance.randrange(6) for _ in range(chance.randint(0, 9))]
        tree = tree_around(generator, path, 12, num_decoys=2) if path else EMPTY_TREE
        position = chance.randrange(1000)
        trees.append((len(expected), tree))
        table.add(served, tree, len(logits), position)
        for node in range(ROOT, len(tree)):
            logits.append((generator.standard_normal(vocab) * 2).astype(np.float32))
            # Most draws lead to a node.
            children = [token for token, parent in zip(tree.token_ids, tree.parents, strict=True) if parent == node]
            logits[-1][children[:1]] += chance.choice([0, 30, 30])
            walk, one = path_to(tree, node), copy.deepcopy(defined)
            for token in walk:
                one.push(token)
            is_near_tie = is_counted(one, logits[-1], position + len(walk), served.near_tie_gap)
            expected.append([one.choose(logits[-1], position + len(walk)), is_near_tie])
        # Rows that nobody draws from: masks.
        logits += [np.zeros(vocab, np.float32)] * chance.randint(0, 2)
    whole = np.array(logits)
    for first in range(0, len(whole), block):
        table.draw(whole[first : first + block], num_threads=2, first=first)
    drawn = np.concatenate([*table.drawn()]).tolist()
    num_nodes = 0
    for root, tree in trees:
        for node in range(ROOT, len(tree)):
            above = [*zip([ROOT, *nodes_to(tree, node)], path_to(tree, node), strict=False)]
            if all(drawn[root + 1 + parent][0] == token for parent, token in above):
                assert drawn[root + 1 + node] == expected[root + 1 + node]
                num_nodes += node != ROOT
    assert num_nodes > 10, "some draws lead to nodes"


def test_threads_share_rows_and_draw_the_same() -> None:
    vocab, rows = 40_000, 40
    logits = (np.random.default_rng(0).standard_normal((rows, vocab)) * 2).astype(np.float32)
    drawn = []
    for threads in (1, 3):
        table = RowTable()
        for row in range(rows):
            chooser = TokenChooser(SamplingParams(temperature=1.0, top_p=0.9, seed=row), vocab, prompt=())
            table.add(chooser, EMPTY_TREE, row, row)
        table.draw(logits, num_threads=threads)
        drawn.append(np.concatenate([*table.drawn()]))
    assert np.array_equal(*drawn)


def test_tokens_follow_the_law_with_every_cut() -> None:
    vocab = 700
    logits = (np.random.default_rng(4).standard_normal(vocab) * 3).astype(np.float32)
    params = SamplingParams(temperature=0.9, top_k=60, top_p=0.85, min_p=0.01, seed=8)
    chooser = TokenChooser(params, vocab, prompt=())
    law = NumpyChooser(params, vocab, prompt=()).law(logits, [])
    assert np.allclose(chooser.law(logits, []), law, rtol=1e-12)
    draws = 20_000
    counts = np.bincount([chooser.choose(logits, position) for position in range(draws)], minlength=vocab)
    assert not counts[law == 0].any()
    likely = law * draws >= 5
    statistic = ((counts - draws * law)[likely] ** 2 / (draws * law[likely])).sum()
    # The 0.9999 quantile of chi-square stays below twice its degrees of freedom and thirty.
    assert statistic < 2 * likely.sum() + 30


def test_64_sequences_of_a_large_vocabulary_add_little_memory() -> None:
    vocab, rows = 262_144, 8
    logits = np.random.default_rng(0).standard_normal((rows, vocab)).astype(np.float32)
    TokenChooser(SamplingParams(), vocab, prompt=()).choose(logits[0], 0)
    tracemalloc.start()
    params = SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, frequency_penalty=0.2, seed=1)
    choosers = [TokenChooser(params, vocab, prompt=range(2000)) for _ in range(64)]
    for first in range(0, 64, rows):
        table = RowTable()
        for row in range(rows):
            table.add(choosers[first + row], EMPTY_TREE, row, 5)
        table.draw(logits)
        for chooser, drawn in zip(choosers[first:], table.drawn(), strict=False):
            chooser.push(int(drawn[0, 0]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 << 20
