"""Passes whose logits are made and sampled in blocks of rows, against passes that make all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from transformers import PreTrainedModel

from coppice.core.tree import chain
from tests.unit.verifier_svc.engine_harness import Harness
from tests.unit.verifier_svc.tiny_engine import PROMPTS, SAMPLING, VOCAB, oracle_drafter, tiny_engine, tiny_target
from verifier_svc.engine import pass_runner
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model.target_model import TargetModel

ROWS = 8


@pytest.fixture
def sizes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Rows of every block from now on, which has at most ROWS of them."""
    seen: list[int] = []
    forward_in_blocks = TargetModel.forward_in_blocks

    def spy(*arguments: object) -> Iterator[torch.Tensor]:
        for block in forward_in_blocks(*arguments):  # type: ignore[arg-type]
            seen.append(len(block))
            yield block

    monkeypatch.setattr(TargetModel, "forward_in_blocks", spy)
    monkeypatch.setattr(pass_runner, "MAX_LOGIT_BYTES", 4 * VOCAB * (ROWS + 1))
    return seen


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "opt"])
def test_blocks_of_logits_are_those_of_a_whole_pass(
    architecture: str, new_model: Callable[[str], PreTrainedModel]
) -> None:
    target = (
        tiny_target(new_model("llama"))
        if architecture == "llama"
        else TargetModel(new_model(architecture), exact=True, num_blocks=60)
    )
    body = target.model.base_model.forward
    whole, states, logits = [], [], []
    for in_blocks in (False, True):
        cache = SequenceCache(target.cache, 64)
        tree = chain([*range(20, 39)], [-1.0] * 19)
        plan = target.plan([SequenceRows(cache, [5, 6, 7], tree, wants_states=True)])
        if in_blocks:
            logits = [*target.forward_in_blocks(plan, ROWS + 1)]
        else:
            whole = [target.forward(plan)]
        states.append(target.take_states())
        cache.release()
    assert [len(block) for block in logits] == [8, 8, 4]
    assert torch.equal(torch.cat(logits), whole[0])
    assert (states[0] == states[1]).all()
    assert target.model.base_model.forward == body


@pytest.mark.parametrize("name", SAMPLING)
def test_outputs_are_the_same_when_logits_come_in_blocks(
    name: str, new_model: Callable[[str], PreTrainedModel], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = tiny_engine(new_model("llama"))
    engine.start()
    harness = Harness(engine)
    asked: dict[str, object] = {"sampling": SAMPLING[name], "top_log_probs": 2 if name == "greedy" else None}
    with monkeypatch.context() as patch:
        patch.setattr(pass_runner, "MAX_LOGIT_BYTES", 1 << 30)
        whole = harness.generate(PROMPTS, **asked)  # type: ignore[arg-type]
        assert not sizes
    drafter = oracle_drafter([one.token_ids for one in whole], 3)
    split = harness.generate(PROMPTS, **asked, drafter=drafter, wants_features={0})  # type: ignore[arg-type]
    engine.stop()
    assert [one.token_ids for one in split] == [one.token_ids for one in whole]
    assert [one.log_probs for one in split] == [one.log_probs for one in whole]
    assert max(sizes, default=0) == ROWS
    assert len(split[0].features) > 0


def test_a_failed_pass_leaves_the_body_of_the_model_as_it_was(new_model: Callable[[str], PreTrainedModel]) -> None:
    target = tiny_target(new_model("llama"))
    cache = SequenceCache(target.cache, 64)
    plan = target.plan([SequenceRows(cache, [5], chain([*range(20, 39)], [-1.0] * 19))])
    blocks = target.forward_in_blocks(plan, ROWS)
    next(blocks)
    with pytest.raises(ZeroDivisionError):
        blocks.throw(ZeroDivisionError())  # type: ignore[attr-defined]
    assert "forward" not in vars(target.model.base_model)
