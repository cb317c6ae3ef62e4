"""The Triton kernels in the interpreter: right to rounding, and the same bits for a row whatever batch it is in."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from tests.unit.verifier_svc.attention_passes import Heads, RandomPass, Share
from verifier_svc.engine.kv_cache import BLOCK_SIZE
from verifier_svc.kernels.base import AttentionRule, KernelLimitError
from verifier_svc.kernels.triton import plan as triton_plan
from verifier_svc.kernels.triton.attention import TritonKernel
from verifier_svc.model.parallel.tensor_attention import TensorKernel

FloatArray = npt.NDArray[np.floating]
CPU = torch.device("cpu")
GROUPED, ODD, MANY, PLAIN = Heads(4, 2, 16, 16), Heads(5, 1, 20, 12), Heads(10, 1, 8, 8), Heads(2, 2, 16, 16)
# Heads of keys are programs of their own: where one says as much as two, the interpreter takes half as long.
PAIR = Heads(2, 1, 16, 16)
# A prompt's beginning; plain decoding behind a full split; a large tree that crosses splits and words of bits.
SHARES = (Share(1, 0, 11), Share(2, triton_plan.SPLIT, 1), Share(3, 240, 2, 38))


def new_kernel(programs: int = 3) -> TritonKernel:
    return TritonKernel(CPU, programs)


@pytest.mark.parametrize(
    ("heads", "dtype", "rule"),
    [
        (GROUPED, torch.float32, AttentionRule(0.3)),
        (GROUPED, torch.float16, AttentionRule(0.3)),
        (ODD, torch.float32, AttentionRule(0.3, sliding_window=24)),
        (MANY, torch.float32, AttentionRule(0.3, sliding_window=200, softcap=2.0)),
        (PLAIN, torch.float16, AttentionRule(0.5, softcap=5.0, sinks=torch.tensor([0.5, 3.0]))),
    ],
    ids=str,
)
def test_outputs_are_those_of_attention_in_double_precision(
    heads: Heads, dtype: torch.dtype, rule: AttentionRule
) -> None:
    one = RandomPass(heads, SHARES, dtype)
    expected = one.run_padded(TensorKernel(CPU, exact=True), rule)
    assert torch.allclose(one.run_padded(new_kernel(), rule), expected, atol=3e-6 if dtype == torch.float32 else 4e-3)


@pytest.mark.parametrize("rule", [AttentionRule(0.3), AttentionRule(0.3, sliding_window=100)], ids=str)
def test_a_rows_bits_do_not_depend_on_its_company(rule: AttentionRule, monkeypatch: pytest.MonkeyPatch) -> None:
    share, others = Share(3, 300, 2, 38), (Share(4, 20, 9), Share(5, 90, 1, 3), Share(6, 0, 3))
    [alone] = RandomPass(PAIR, [share], torch.float32).run(new_kernel(), rule)
    in_company = RandomPass(PAIR, [*others[:2], share, others[2]], torch.float32, row_multiple=16)
    assert torch.equal(in_company.run(new_kernel(1), rule)[2], alone)
    # In a pass with enough work, contexts are not cut into parts that are read side by side.
    monkeypatch.setattr(triton_plan, "MOST_PARTS", 1)
    assert torch.equal(in_company.run(new_kernel(), rule)[2], alone)


@pytest.fixture
def even_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrix products that treat all rows alike, as matrix units do; those of numpy's library depend on the place."""

    def matmul(left: FloatArray, right: FloatArray, dtype: npt.DTypeLike = None) -> FloatArray:
        products: FloatArray = left.astype(dtype)[:, :, None] * right.astype(dtype)[None]
        total: FloatArray = products.sum(1)
        return total

    monkeypatch.setattr(np, "matmul", matmul)


@pytest.mark.usefixtures("even_products")
def test_a_chain_has_the_same_bits_however_it_is_cut_into_passes() -> None:
    rule = AttentionRule(0.3)
    [at_once] = RandomPass(PAIR, [Share(7, 250, 13)], torch.float32).run(new_kernel(), rule)
    for context in (250, 256, 257, 262):
        rows = [Share(7, context, 263 - context)]
        [some] = RandomPass(PAIR, rows, torch.float32).run(new_kernel(), rule)
        assert torch.equal(some, at_once[context - 250 :])


def test_padding_is_zero_and_is_written_where_nobody_reads() -> None:
    one = RandomPass(GROUPED, [Share(8, 3, 1, 2)], torch.float32, row_multiple=16)
    kernel = new_kernel()
    output = one.run_padded(kernel, AttentionRule(0.3))
    assert torch.equal(output[3:], torch.zeros(13, 4, 16))
    written = {int(slot) for slot in one.plan.segments[0].slots(0, 6)}
    for pool in one.pools(kernel):
        is_number = ~pool[:-1].isnan().all(-1).all(1)
        assert {block * BLOCK_SIZE + place for block, place in is_number.nonzero().tolist()} == written


def test_what_it_does_not_know_is_refused() -> None:
    for heads, dtype, message in (
        (GROUPED, torch.float64, "float64"),
        (Heads(1, 1, 264, 16), torch.float32, "at most 256"),
    ):
        one = RandomPass(heads, [Share(9, 0, 1)], dtype)
        with pytest.raises(KernelLimitError, match=message):
            one.run(new_kernel(), AttentionRule(0.3))
