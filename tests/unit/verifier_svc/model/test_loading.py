"""The context that is offered is one that the KV cache holds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal

import pytest
from transformers import Lfm2Config, Lfm2ForCausalLM

from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from tests.unit.verifier_svc.extras.redraft.test_redraft import SETTINGS
from tests.unit.verifier_svc.tiny_engine import tiny_info
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.engine.sequence import Sequence, SequenceSpec
from verifier_svc.extras.redraft.groups import MaskShape
from verifier_svc.extras.redraft.redraft import RedraftSettings
from verifier_svc.model.loading import allot_states, context_that_fits, refuse_unsupported

MASKS = replace(SETTINGS, shape=MaskShape(3, 4))


@pytest.mark.parametrize("redraft", [None, MASKS], ids=["without masks", "with masks"])
@pytest.mark.parametrize("max_nodes", [1, 16, 64, 100])
@pytest.mark.parametrize("num_blocks", [2, 3, 7])
def test_a_request_without_max_tokens_just_fits(
    num_blocks: int, max_nodes: int, redraft: RedraftSettings | None, caplog: pytest.LogCaptureFixture
) -> None:
    context = context_that_fits(1 << 20, num_blocks, max_nodes, redraft)
    [record] = caplog.records
    assert (record.levelname, str(context) in record.message) == ("WARNING", True)

    def num_blocks_needed(max_context_tokens: int) -> int:
        info = replace(tiny_info(), max_context_tokens=max_context_tokens, redraft=redraft)
        spec = SequenceSpec((5,), SamplingParams(), StoppingOptions(), max_redraft_nodes=7)
        tokenizer = TargetTokenizer(info.tokenizer_json)
        return Sequence(spec, info, tokenizer, max_nodes=max_nodes, opened_s=0.0).residence.num_blocks_needed

    assert num_blocks_needed(context) == num_blocks
    assert num_blocks_needed(context + 1) == num_blocks + 1


def test_a_cache_that_is_large_enough_changes_nothing_and_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    for limit in (2, 50, 2 * BLOCK_SIZE - 28):
        assert context_that_fits(limit, 2, 16, MASKS) == limit
    assert not caplog.records


def test_a_cache_without_room_for_any_text_is_refused() -> None:
    assert context_that_fits(100, 1, BLOCK_SIZE - 2, None) == 2
    with pytest.raises(IncompatibleError, match=r"holds 64 tokens .* 63 rows.*KV_CACHE_MIB"):
        context_that_fits(100, 1, BLOCK_SIZE - 1, None)
    with pytest.raises(IncompatibleError, match="75 rows"):
        context_that_fits(100, 1, BLOCK_SIZE - 1, MASKS)


class CountedStates:
    """A target with recurrent states of so many mebibytes, which notes how many it is to have."""

    def __init__(self, mebibytes: int) -> None:
        self.recurrent = SimpleNamespace(bytes_per_state=mebibytes << 20)
        self.num_states = (0, 0)

    def set_num_states(self, num_running: int, num_kept: int) -> None:
        self.num_states = num_running, num_kept


@pytest.mark.parametrize(
    ("mebibytes", "cache", "reuse", "states", "allotted"),
    [
        # Two states for each sequence, and a quarter as many at borders.
        (1, 1024, "on", (64, 16), 144),
        (1, 1024, "off", (64, 0), 128),
        # Half of the cache, and fewer sequences than there may be.
        (100, 1024, "on", (2, 1), 500),
        (100, 400, "on", (1, 0), 200),
    ],
)
def test_recurrent_states_take_half_of_the_cache_at_most(
    mebibytes: int, cache: int, reuse: Literal["on", "off"], states: tuple[int, int], allotted: int
) -> None:
    target: Any = CountedStates(mebibytes)
    config = VerifierConfig(model="m", kv_cache_mib=cache, prefix_reuse=reuse)
    assert allot_states(target, config) == allotted
    assert target.num_states == states


def test_a_cache_without_room_for_one_sequences_states_is_refused() -> None:
    target: Any = CountedStates(100)
    with pytest.raises(IncompatibleError, match=r"take 200\.0 MiB, more than half .*KV_CACHE_MIB"):
        allot_states(target, VerifierConfig(model="m", kv_cache_mib=399))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tensor_parallel": 2}, "in one process"),
    ],
)
def test_recurrent_layers_refuse_what_they_do_not_support(settings: dict[str, Any], why: str) -> None:
    config = Lfm2Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, layer_types=["conv"])
    model = Lfm2ForCausalLM(config)
    refuse_unsupported(model, VerifierConfig(model="m"))
    with pytest.raises(IncompatibleError, match=f"recurrent layers, which run {why}"):
        refuse_unsupported(model, VerifierConfig(model="m", **settings))
