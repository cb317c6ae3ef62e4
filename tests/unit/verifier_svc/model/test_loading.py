"""The context that is offered is one that the KV cache holds."""

from __future__ import annotations

from dataclasses import replace

import pytest

from coppice.core.errors import IncompatibleError
from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from tests.unit.verifier_svc.extras.redraft.test_redraft import SETTINGS
from tests.unit.verifier_svc.tiny_engine import tiny_info
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.engine.sequence import Sequence, SequenceSpec
from verifier_svc.extras.redraft.groups import MaskShape
from verifier_svc.extras.redraft.redraft import RedraftSettings
from verifier_svc.model.loading import context_that_fits

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
