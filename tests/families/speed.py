"""`python -m tests.families.speed`: what passes of a hybrid of Qwen3.5's shape cost, random weights, in each precision.

Rows and trees are compared in turn, and the prefill with transformers' in the same precision. Other processes should be
quiet.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from coppice.core.tree import TokenTree, chain
from coppice.kernels.cpu.openmp import set_spin_count
from tests.families.peak_memory import CONTEXT, NODES, bushy, measured

VOCAB = 8192
PREFILL = 2048
ROWS = (1, 2, 4, 8, 16, 32)


def median_ms(works: list[Callable[[], object]], runs: int) -> list[float]:
    """Median time of each work, in turn."""
    times: list[list[float]] = [[] for _ in works]
    for run in range(runs + 1):
        for work, found in zip(works, times, strict=True):
            begun_s = time.perf_counter()
            work()
            if run:
                found.append((time.perf_counter() - begun_s) * 1000)
    return [statistics.median(found) for found in times]


def figures(directory: Path, dtype: str, threads: int, runs: int) -> dict[str, Any]:
    """Times of passes and of a prefill in one precision, memory of a sequence's states, and that of a tree's pass."""
    import torch
    from transformers import AutoModelForCausalLM

    from verifier_svc.config import VerifierConfig
    from verifier_svc.engine.kv_cache import SequenceCache
    from verifier_svc.engine.pass_plan import SequenceRows
    from verifier_svc.model.loading import load_probed_target

    torch.set_num_threads(threads)
    settings: dict[str, Any] = {"model": str(directory), "dtype": dtype, "threads": threads}
    target, info = load_probed_target(VerifierConfig(**settings, exactness="strict"))
    cache = SequenceCache(target.cache, 2 * CONTEXT)
    target.forward(target.plan([SequenceRows(cache, list(range(CONTEXT)), wants_logits=False)]))
    cache.keep(range(CONTEXT))

    def passed(tree: TokenTree) -> Callable[[], object]:
        return lambda: target.forward(target.plan([SequenceRows(cache, [1], tree)]))

    rows = median_ms([passed(chain(range(count - 1))) for count in ROWS], runs)
    line, tree = median_ms([passed(chain(range(NODES))), passed(bushy(NODES))], 2 * runs)

    assert target.recurrent is not None
    prompt = torch.arange(PREFILL)[None] % VOCAB
    plain = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()

    def ours() -> None:
        whole = SequenceCache(target.cache, PREFILL)
        target.forward(target.plan([SequenceRows(whole, prompt[0].tolist(), wants_logits=False)]))
        whole.release()

    @torch.inference_mode()
    def theirs() -> None:
        plain(prompt, logits_to_keep=1)

    own_ms, their_ms = median_ms([ours, theirs], 3)
    return {
        "dtype": info.dtype,
        "parameters": info.num_parameters,
        "threads": threads,
        "pass_ms": {count: round(found, 2) for count, found in zip(ROWS, rows, strict=True)},
        "rows16/rows1": round(rows[ROWS.index(16)] / rows[0], 3),
        "tree32/chain32": round(tree / line, 3),
        "prefill_ms": round(own_ms),
        "prefill/transformers": round(own_ms / their_ms, 3),
        "state_kib": round(target.recurrent.bytes_per_state / 1024),
        "peak_mib": measured(directory, dtype) if sys.platform == "linux" else None,
    }


def main(
    dtypes: Annotated[str, typer.Option(help="Precisions, in turn.")] = "float32,bfloat16",
    threads: Annotated[int, typer.Option(min=1, help="Of every pass.")] = 2,
    runs: Annotated[int, typer.Option(min=1, help="Of each pass; medians are told.")] = 9,
) -> None:
    """Write a checkpoint of 37 million random weights, and print a line of JSON per precision."""
    set_spin_count()
    # Here, because torch reads that setting when it is imported.
    import torch
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig
    from transformers.utils import logging as transformers_logging

    from tests.tiny_checkpoint import write_tokenizer

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    linear = {f"linear_{name}": 8 for name in ("num_value_heads", "num_key_heads")}
    linear |= {f"linear_{name}": 64 for name in ("key_head_dim", "value_head_dim")}
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB, max_position_embeddings=2 * PREFILL, eos_token_id=2, **sizes, **heads, **linear
    )
    with tempfile.TemporaryDirectory() as directory:
        Qwen3_5ForCausalLM(config).save_pretrained(directory)
        write_tokenizer(Path(directory), VOCAB)
        for dtype in dtypes.split(","):
            typer.echo(json.dumps(figures(Path(directory), dtype, threads, runs)))


if __name__ == "__main__":
    typer.run(main)
