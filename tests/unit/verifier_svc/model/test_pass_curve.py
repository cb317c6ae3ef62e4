"""What more rows cost a small pass: as it was measured, and never less than fewer rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from torch import Tensor
from transformers import PreTrainedModel

from tests.unit.verifier_svc.tiny_engine import CONTEXT, tiny_target
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.extras.redraft.groups import MaskShape
from verifier_svc.extras.redraft.redraft import RedraftSettings
from verifier_svc.model.loading import measure_curve, with_costs
from verifier_svc.model.pass_curve import PassCurve
from verifier_svc.model.target_model import TargetModel


def test_rows_between_sizes_take_as_long_as_the_next_size() -> None:
    curve = PassCurve.of_sizes([2, 4, 6], [0.5, 0.6, 1.0])
    assert [curve.at(rows) for rows in range(1, 7)] == pytest.approx([1, 1, 1.2, 1.2, 2, 2])
    assert curve.per_row == pytest.approx(0.2)
    assert [curve.at(7), curve.at(11)] == pytest.approx([2.2, 3.0]), "beyond them they take as long on average"
    assert PassCurve.line(0.06).at(11) == pytest.approx(1.6)


def test_more_rows_never_take_less() -> None:
    """A pass of four rows was quicker than one of two: the machine was busy when that ran."""
    assert PassCurve.of_sizes([2, 4, 6], [1.0, 0.8, 1.1]).times == pytest.approx((1, 1, 1, 1, 1.1, 1.1))


@pytest.mark.parametrize("times", [(), (1.0,), (0.0, 1.0), (1.0, 0.9)])
def test_what_is_no_curve_is_refused(times: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="times of passes"):
        PassCurve(times)


class Timed:
    """A target whose passes take what is said, by a clock of its own; some take much longer, and very few less."""

    def __init__(self, target: TargetModel, seconds: Callable[[int], float]) -> None:
        self.now_s = 0.0
        self.sizes: list[int] = []
        forward = target.forward

        def timed(plan: PassPlan) -> Tensor:
            size = len(plan.token_ids)
            self.sizes.append(size)
            number = len(self.sizes)
            self.now_s += seconds(size) * (5 if number % 7 == 0 else 0.5 if number % 23 == 0 else 1)
            return forward(plan)

        target.forward = timed  # type: ignore[method-assign]


@pytest.fixture
def target(new_model: Callable[[str], PreTrainedModel]) -> TargetModel:
    return tiny_target(new_model("llama"))


def test_the_curve_is_that_of_passes_which_nothing_held_up(target: TargetModel) -> None:
    """Blocks of eight rows, each of which takes as long as the pass by itself."""
    timed = Timed(target, lambda size: 1e-3 * (1 + -(-size // 8)))
    curve = measure_curve(target, CONTEXT, 2.0, lambda: timed.now_s)
    assert curve is not None
    assert [curve.at(rows) for rows in (1, 8, 9, 16, 17, 24)] == pytest.approx([1, 1, 1.5, 1.5, 2, 2])
    assert target.cache.num_free_blocks == target.cache.num_blocks


def test_a_large_target_is_not_measured(target: TargetModel) -> None:
    timed = Timed(target, lambda _: 0.5)
    assert measure_curve(target, CONTEXT, 2.0, lambda: timed.now_s) is None
    assert len(timed.sizes) == 1, "it does not delay the start by more than a pass"
    assert target.cache.num_free_blocks == target.cache.num_blocks


@pytest.mark.parametrize(("max_tokens", "num_blocks"), [(24, 60), (CONTEXT, 1)])
def test_a_sequence_that_has_no_room_is_not_measured(target: TargetModel, max_tokens: int, num_blocks: int) -> None:
    """The model knows no positions that far, or the cache is too small."""
    target.resize_cache(num_blocks)
    assert measure_curve(target, max_tokens, 2.0) is None
    assert target.cache.num_free_blocks == num_blocks


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_positions_stay_within_what_a_model_knows(family: str, new_model: Callable[[str], PreTrainedModel]) -> None:
    """Those of these two are tables."""
    target = tiny_target(new_model(family))
    config = target.model.config
    assert measure_curve(target, config.max_position_embeddings, 60.0) is not None
    assert measure_curve(target, 40, 60.0) is not None


def test_nothing_is_measured_where_rows_are_taken_whatever_they_cost(target: TargetModel) -> None:
    settings = RedraftSettings(MaskShape(2, 3), 7, 16, ((0.0, (1.0,)),))
    assert len(with_costs(settings, target, CONTEXT).curve.times) > len(settings.curve.times)
    whole = replace(settings, min_probability=0.0)
    assert with_costs(whole, target, CONTEXT) is whole
