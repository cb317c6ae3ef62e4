"""What fails in passes and rounds: who ends with it, and that others go on as if nothing had been."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import grpc
import pytest
from transformers import PreTrainedModel

from coppice.core.errors import CoppiceError, InvalidRequestError, InvalidTreeError
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tree import EMPTY_TREE, TokenTree
from tests.unit.verifier_svc.early_heads import random_head
from tests.unit.verifier_svc.tiny_engine import LIMITS, PROMPTS, VOCAB, tiny_info, tiny_target
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.kv_cache import BLOCK_SIZE, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.engine.scheduler import Scheduler
from verifier_svc.engine.sequence import Draft, SequenceKey, SequenceSpec
from verifier_svc.engine.sequence import Sequence as RunningSequence
from verifier_svc.model.target_model import TargetModel
from verifier_svc.stream.events import ErrorEvent, Event, OutcomeEvent

NewModel = Callable[[str], PreTrainedModel]
# More than a block, so that there is something to share.
PROMPT = tuple(PROMPTS[1])
NUM_TOKENS = 20


class Bench:
    """An engine that is not started: a test takes every step."""

    def __init__(self, target: TargetModel) -> None:
        self.engine = Engine(target, tiny_info(), LIMITS, max_nodes=16)
        self.outcomes: dict[int, list[OutcomeEvent]] = {}
        self.errors: dict[int, CoppiceError] = {}
        self.engine.attach(0, self._take)

    def open(self, number: int, prompt: tuple[int, ...], linger_s: float = 0.0) -> None:
        stopping = StoppingOptions(max_tokens=NUM_TOKENS, ignore_eos=True)
        self.outcomes[number] = []
        self.engine.open(SequenceKey(0, number), SequenceSpec(prompt, SamplingParams(), stopping, linger_s=linger_s))

    def draft(self, number: int, tree: TokenTree, linger_s: float | None = None) -> None:
        last = self.outcomes[number][-1].outcome
        draft = Draft(last.base_length + len(last.token_ids), tree, linger_s=linger_s)
        self.engine.submit(SequenceKey(0, number), draft)

    def until(self, is_over: Callable[[], object]) -> None:
        while not is_over():
            self.engine.step()
            self.engine._deliver()

    def rest(self, number: int) -> list[int]:
        """The whole output of a sequence that is not to fail."""
        self.until(lambda: len(self.tokens(number)) == NUM_TOKENS or number in self.errors)
        assert number not in self.errors
        return self.tokens(number)

    def tokens(self, number: int) -> list[int]:
        return [token for event in self.outcomes[number] for token in event.outcome.token_ids]

    def _take(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, ErrorEvent):
                self.errors[event.sequence_id] = event.error
            elif isinstance(event, OutcomeEvent):
                self.outcomes[event.sequence_id].append(event)


def broken(*_: object) -> None:
    raise RuntimeError("out of memory")


@pytest.fixture
def bench(new_model: NewModel) -> Bench:
    return Bench(tiny_target(new_model("llama")))


def break_one(
    patch: pytest.MonkeyPatch, where: type, method: str, error: Exception, is_it: Callable[..., bool]
) -> None:
    """From now on a method raises `error` where `is_it` says so of its arguments."""
    whole = getattr(where, method)

    def call(*arguments: object, **named: object) -> object:
        if is_it(*arguments):
            raise error
        return whole(*arguments, **named)

    patch.setattr(where, method, call)


@pytest.mark.parametrize("error", [MemoryError(), ValueError("of ours"), AssertionError("of ours")], ids=repr)
def test_whatever_a_pass_fails_with_ends_its_sequences_alone(
    error: Exception, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        break_one(patch, TargetModel, "forward", error, lambda *_: True)
        bench.open(1, PROMPT)
        bench.until(lambda: bench.errors)
    assert bench.errors[1].status is grpc.StatusCode.INTERNAL
    assert (bench.engine.counts.num_failed_passes, bench.engine.counts.failed["internal"]) == (1, 1)
    bench.open(2, PROMPT)
    bench.rest(2)
    assert bench.engine.cache.num_free_blocks == bench.engine.cache.num_blocks


@pytest.mark.parametrize(
    ("method", "error", "status"),
    [
        ("__init__", ValueError("of ours"), grpc.StatusCode.INTERNAL),
        ("submit", ValueError("of ours"), grpc.StatusCode.INTERNAL),
        ("finish_round", ValueError("of ours"), grpc.StatusCode.INTERNAL),
        # Of a tree that was right when it came.
        ("finish_round", InvalidTreeError("of ours"), grpc.StatusCode.INTERNAL),
        ("finish_round", InvalidRequestError("sampling", "is theirs"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
    ids=["opening", "draft", "round", "tree of a round", "request"],
)
def test_what_fails_for_one_sequence_ends_it_alone(
    method: str, error: Exception, status: grpc.StatusCode, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.open(0, PROMPT)
    plain = bench.rest(0)
    with monkeypatch.context() as patch:
        if method == "__init__":
            break_one(patch, RunningSequence, method, error, lambda _, spec, *__: spec.prompt == (50, 51))
        else:
            break_one(patch, RunningSequence, method, error, lambda sequence, *_: sequence.tokens[:2] == [50, 51])
        bench.open(1, PROMPT)
        bench.open(2, (50, 51))
        bench.engine.submit(SequenceKey(0, 2), Draft(2, EMPTY_TREE))
        assert bench.rest(1) == plain
    assert list(bench.errors) == [2]
    assert bench.errors[2].status is status
    assert "of ours" not in str(bench.errors[2])
    assert bench.engine.cache.num_free_blocks == bench.engine.cache.num_blocks


def test_a_model_thread_that_ends_unasked_says_so_and_one_that_is_stopped_does_not(
    new_model: NewModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tiny_target(new_model("llama"))
    for is_broken in (False, True):
        bench, lost = Bench(target), threading.Event()
        bench.engine.start(lost.set)
        with monkeypatch.context() as patch:
            if is_broken:
                break_one(patch, Scheduler, "next_batch", ValueError("of ours"), lambda *_: True)
            bench.open(1, PROMPT)
            assert lost.wait(10 if is_broken else 0.2) == is_broken
            bench.engine.stop()
        assert lost.is_set() == is_broken


@pytest.mark.parametrize("method", ["begin", "attend"], ids=["before rows moved", "after rows moved"])
def test_a_failed_pass_ends_others_too_where_their_rows_have_not_moved(method: str, new_model: NewModel) -> None:
    target = tiny_target(new_model("llama"))
    bench = Bench(target)
    bench.open(0, PROMPT)
    plain = bench.rest(0)
    # A round whose path leaves a row out: the next pass, which is not its own, is to move the other one.
    bench.open(1, PROMPT, linger_s=30.0)
    bench.until(lambda: bench.outcomes[1])
    bench.draft(1, TokenTree(((plain[1] + 1) % VOCAB, plain[1]), (-1, -1), (-0.1, -3.0)))
    bench.until(lambda: len(bench.outcomes[1]) == 2)
    assert bench.outcomes[1][-1].outcome.accepted_nodes == (1,)
    bench.open(2, (50, 51, 52))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target._attention.kernel, method, broken)
        bench.until(lambda: bench.errors)
    if method == "attend":
        assert list(bench.errors) == [2]
        bench.draft(1, EMPTY_TREE, linger_s=0.0)
        assert bench.rest(1) == plain
    else:
        assert sorted(bench.errors) == [1, 2]
        assert {error.status for error in bench.errors.values()} == {grpc.StatusCode.INTERNAL}
        assert bench.engine.cache.num_free_blocks == bench.engine.cache.num_blocks
    bench.open(3, PROMPT)
    assert bench.rest(3) == plain
    # Nor is anything used again that moves may have been meant for.
    assert bench.outcomes[3][0].cached_tokens == (BLOCK_SIZE if method == "attend" else 0)


@pytest.mark.parametrize("method", ["forward", "forward_pruned"])
@pytest.mark.parametrize("failing", ["begin", "attend"])
def test_a_target_says_whether_rows_have_moved(method: str, failing: str, new_model: NewModel) -> None:
    target = tiny_target(new_model("llama"))
    target.install_head(random_head(64))
    sequence = SequenceCache(target.cache, BLOCK_SIZE)
    run = getattr(target, method)
    run(target.plan([SequenceRows(sequence, [5, 6, 7])]))
    sequence.keep([0, 2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target._attention.kernel, failing, broken)
        with pytest.raises(RuntimeError, match="out of memory"):
            run(target.plan([SequenceRows(sequence, [8])]))
    assert target.cache.has_unmade_moves == (failing == "begin")
