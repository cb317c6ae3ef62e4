"""Device code without a GPU: `interpreted/` tests it in Triton's interpreter, and here it is compiled for GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

triton: Any = pytest.importorskip("triton", reason="Triton is not installed (extra `triton`; Linux on x86-64)")

ROOT = Path(__file__).resolve().parents[3]
INTERPRETED = Path(__file__).parent / "interpreted"
# Shared memory of a block on the smallest of the devices that have products of bfloat16, bytes.
LEAST_SHARED_MEMORY = 99 * 1024


def version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


@pytest.mark.timeout(600)
@pytest.mark.skipif(
    version(triton.__version__) < (3, 7) and version(np.__version__) >= (2, 4),
    reason="the interpreter of Triton before 3.7 does not work with numpy 2.4",
)
def test_the_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(INTERPRETED)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=580,
    )
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)
    assert "skipped" not in done.stdout


@pytest.mark.parametrize("capability", [80, 90])
def test_the_kernels_compile_for_gpus(capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16, with 4 query heads of 128 for each key head; to machine code, for which no GPU is needed."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from verifier_svc.kernels.triton import kernels as triton_kernels
    from verifier_svc.kernels.triton.attention import HeadShape
    from verifier_svc.kernels.triton.plan import ITEM_FIELDS, SPLIT, TILE_FIELDS, TILE_ROWS

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    shape = HeadShape(32, 8, 128, 128)
    compiled_in = {
        **shape.tiles,
        **shape.columns,
        "BLOCK": 64,
        "SPLIT": SPLIT,
        "ROWS": TILE_ROWS,
        "KEY_HEADS": 8,
        "HAS_SOFTCAP": True,
        "HAS_WINDOW": True,
        "HAS_SINKS": True,
        "PRECISION": "ieee",
    }
    numbers = {"scale": "fp32", "softcap": "fp32", "part_sums": "*fp32", "part_weights": "*fp32"}
    halves = dict.fromkeys(("query", "key", "value", "keys", "values", "sinks", "output"), "*bf16")
    whole = dict.fromkeys(("slots", "num_items", "items", "positions", "bits", "tables", "num_tiles", "tiles"), "*i32")
    for name, fields in (("store_rows", 0), ("attend_items", ITEM_FIELDS), ("join_parts", TILE_FIELDS)):
        kernel = getattr(triton_kernels, name)
        constants = {key: value for key, value in {**compiled_in, "FIELDS": fields}.items() if key in kernel.arg_names}
        types = numbers | halves | whole | dict.fromkeys(constants, "constexpr")
        signature = {argument: types.get(argument, "i32") for argument in kernel.arg_names}
        source = ASTSource(kernel, signature, constants)
        options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
        code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        assert code.asm["cubin"]
        assert code.metadata.shared <= LEAST_SHARED_MEMORY
        if name == "attend_items":
            assert "mma.sync" in code.asm["ptx"]


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize(("corrects", "has_rates"), [(True, False), (False, False), (False, True)])
def test_recurrences_compile_for_gpus(
    corrects: bool, has_rates: bool, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-Next's heads, Mamba-2's with 128 keys, and Mamba-1's."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from verifier_svc.kernels.triton.recurrences import advance_walks
    from verifier_svc.kernels.triton.walks import STEP_FIELDS

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    keys, values = (16, 64) if has_rates else (128, 128 if corrects else 64)
    constants = {
        **{"FIELDS": STEP_FIELDS, "HEADS": 32, "GROUPS": 16, "KEYS": keys, "VALUES": values, "WIDTH": keys},
        **{"COLUMNS": 32, "DECAYS": 1, "STRENGTHS": values if has_rates else 1},
        **{"CORRECTS": corrects, "HAS_RATES": has_rates},
    }
    signature = dict.fromkeys(advance_walks.arg_names, "*fp32")
    signature |= {"starts": "*i32", "steps": "*i32", **dict.fromkeys(constants, "constexpr")}
    source = ASTSource(advance_walks, signature, constants)
    options = {"num_warps": 4, "num_stages": 1, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert code.asm["cubin"]
    assert code.metadata.shared <= LEAST_SHARED_MEMORY


@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_products_of_experts_compile_for_gpus(
    dtype: str, capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from verifier_svc.kernels.triton.experts import multiply_tiles

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {
        **{"CHOSEN": 8, "INPUTS": 2048, "OUTPUTS": 1536, "ROWS": 16, "COLUMNS": 64, "DEPTH": 32},
        **{"IS_TRANSPOSED": False, "HAS_BIASES": True},
    }
    signature = dict.fromkeys(multiply_tiles.arg_names, f"*{dtype}")
    signature |= dict.fromkeys(("order", "experts", "firsts", "stops"), "*i64") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(multiply_tiles, signature, constants)
    options = {"num_warps": 4, "num_stages": 2, "enable_fp_fusion": False}
    code = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert code.asm["cubin"]
    assert code.metadata.shared <= LEAST_SHARED_MEMORY
