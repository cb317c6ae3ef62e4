"""Log-probabilities: how many may be asked for, and their way across the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from coppice.core.errors import CoppiceError, InvalidRequestError
from coppice.core.log_probs import MAX_TOP_LOG_PROBS, TokenLogProbs, check_top_log_probs
from coppice.v1 import inference_pb2, verifier_pb2
from coppice.wire.convert import add_log_probs, log_probs_from_proto, log_probs_to_proto, outcome_log_probs

VALUES = st.floats(max_value=0, width=32, allow_nan=False)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[TokenLogProbs, ...]:
    """The log-probabilities of a round's tokens."""
    num_top = draw(st.integers(0, 3))

    def several(values: st.SearchStrategy[float]) -> tuple[float, ...]:
        return tuple(draw(st.lists(values, min_size=num_top, max_size=num_top)))

    ids = st.integers(0, 2**32 - 1)
    return tuple(TokenLogProbs(draw(VALUES), several(ids), several(VALUES)) for _ in range(draw(st.integers(0, 4))))


@given(blocks())
def test_a_round_s_log_probabilities_survive_both_wires(block: tuple[TokenLogProbs, ...]) -> None:
    outcome = verifier_pb2.Outcome(token_ids=[7] * len(block))
    add_log_probs(outcome, block)
    assert outcome_log_probs(verifier_pb2.Outcome.FromString(outcome.SerializeToString())) == block
    response = inference_pb2.GenerateResponse(log_probs=log_probs_to_proto(block))
    parsed = inference_pb2.GenerateResponse.FromString(response.SerializeToString())
    assert log_probs_from_proto(parsed.log_probs) == block


@pytest.mark.parametrize(
    "outcome",
    [
        verifier_pb2.Outcome(token_ids=[1, 2], log_probs=[-1]),
        verifier_pb2.Outcome(token_ids=[1], log_probs=[-1, -2]),
        verifier_pb2.Outcome(log_probs=[-1]),
        verifier_pb2.Outcome(token_ids=[1, 2], log_probs=[-1, -2], top_token_ids=[3], top_log_probs=[-1]),
        verifier_pb2.Outcome(token_ids=[1], log_probs=[-1], top_token_ids=[3, 4], top_log_probs=[-1]),
    ],
    ids=["too few", "too many", "no tokens", "a ragged top", "ids without values"],
)
def test_log_probabilities_that_do_not_fit_the_tokens_are_an_error(outcome: verifier_pb2.Outcome) -> None:
    with pytest.raises(CoppiceError, match="do not fit"):
        outcome_log_probs(outcome)


def test_the_number_of_likeliest_tokens_is_bounded() -> None:
    check_top_log_probs("field", 0)
    check_top_log_probs("field", MAX_TOP_LOG_PROBS)
    for number in (-1, MAX_TOP_LOG_PROBS + 1):
        with pytest.raises(InvalidRequestError, match=str(number)) as caught:
            check_top_log_probs("field", number)
        assert caught.value.field == "field"
