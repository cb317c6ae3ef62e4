"""The verifier's settings, read once from the environment."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from coppice.net.service_settings import ServiceSettings
from coppice.settings import LAB, Mebibytes, Nodes, Rows, Rule, Seconds, Switch, Tokens

# A smaller bound saves nothing, and would leave no rows for prompts.
MIN_ROWS = 4

# Exit codes of the process: address in use; invalid setting or unsupported model; tensor-parallel process lost; model
# thread ended.
UNAVAILABLE_ERROR = 1
CONFIGURATION_ERROR = 2
WORKER_LOST = 3
ENGINE_LOST = 4


class VerifierConfig(ServiceSettings):
    """Settings of the verifier process."""

    model: Annotated[str, Rule("a checkpoint directory or hub id", bool)] = Field(
        description="The target: a checkpoint directory or a hub id."
    )
    target_revision: str = Field(
        default="", description="Name of this state of the target, for orchestrators that ask for it."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the target runs; `auto` takes a GPU if there is one."
    )
    # See cpu_threads.py.
    threads: int = Field(
        default=0, ge=0, description="CPU threads of a pass, per process; 0 picks by the number of rows."
    )
    exactness: Literal["auto", "strict", "fast"] = Field(
        default="auto",
        description="`strict`: logits do not depend on what else is in the pass; `fast` allows rounding; `auto` is "
        "strict on a CPU and fast on a GPU.",
    )
    # See precision.py.
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto",
        description="Numbers that the target is served in; `auto` is bfloat16 on a GPU, and on a CPU that multiplies "
        "such numbers for checkpoints in bfloat16 and GGUF files, else float32.",
    )
    # See coppice/checkpoints/quantization.py.
    quantization: Literal["none", "int8"] = Field(
        default="none",
        description="`int8` keeps weights in 8 bits, on CPUs that compile layers: faster, and outputs are those of the "
        "quantised model.",
    )
    tensor_parallel: int = Field(default=1, ge=1, description="Processes that hold a part of the target each.")
    collective_timeout_s: Annotated[Seconds, LAB] = Field(
        default=120.0, gt=0, description="How long one of these may keep the others waiting before the verifier ends."
    )
    grace_s: Seconds = Field(default=20.0, ge=0, description="How long running sequences may take after SIGTERM.")

    max_sequences: int = Field(default=64, ge=1, description="Sequences that run at once.")
    max_queued: int = Field(default=1024, ge=1, description="Sequences that may wait for a place.")
    max_nodes: Nodes = Field(default=64, ge=1, description="Most draft nodes of a round, whatever its budget says.")
    max_context_tokens: Tokens = Field(
        default=0,
        ge=0,
        description="Longest sequence, within what the KV cache holds; 0 takes the model's own limit.",
    )
    # Trees shrink first, then prompts wait.
    max_rows: Annotated[Rows, LAB, Rule(f"0 or at least {MIN_ROWS}", lambda rows: rows == 0 or rows >= MIN_ROWS)] = (
        Field(default=0, description="Most rows of a pass over all sequences, before padding; 0 sets no limit.")
    )
    prefill_chunk: Tokens = Field(default=512, ge=1, description="Most prompt tokens of a pass, over all sequences.")
    kv_cache_mib: Mebibytes = Field(default=1024, ge=1, description="Memory of the KV cache, per process.")
    prefix_reuse: Switch = Field(
        default="on", description="Let prompts that begin alike share what is computed for their beginning."
    )
    # See loading.py.
    near_tie_gap: Annotated[float, LAB] = Field(
        default=0.0,
        ge=0,
        description="In fast mode, gap of the two best scores below which a token counts as a near tie, in logits; "
        "0 takes what rounding can do in the model's precision.",
    )

    prompt_lookup: Switch = Field(
        default="on",
        description="Draft from a request's own text where it has no drafter and the target has no adapter.",
    )
    # See extras/head/head.py.
    eagle_head: str = Field(
        default="",
        description="Directory of a checkpoint of kind eagle that drafts in the verifier's own process, for requests "
        "that no drafter serves; empty: none.",
    )
    # See extras/redraft/adapter.py. Masks and nodes are chosen by cost; with a least probability of 0 all are used.
    space_adapter: str = Field(
        default="", description="Directory of an adapter with which the target drafts in its own passes; empty: none."
    )
    redraft_tokens: Annotated[int, LAB] = Field(
        default=3,
        ge=0,
        description="Most masks after each likely end of the accepted path; 0 takes all that it has.",
    )
    redraft_groups: Annotated[int, LAB] = Field(default=3, ge=1, description="Most such ends of a round.")
    redraft_nodes: Annotated[Nodes, LAB] = Field(default=7, ge=1, description="Most nodes of a re-draft.")
    redraft_min_probability: Annotated[float, LAB] = Field(
        default=0.02, ge=0, le=1, description="Least probability of a re-drafted node's path; 0 also ignores costs."
    )
    redraft_rows: Annotated[Rows, LAB] = Field(
        default=0, ge=0, description="Masks only in passes of at most so many rows; 0 takes what fits the device."
    )
    # See extras/pruning/head.py.
    early_head: str = Field(
        default="", description="Directory of a head that prunes nodes after an early layer; empty: none are pruned."
    )
    early_pruning: Annotated[Literal["auto", "on", "compare", "off"], LAB] = Field(
        default="auto", description="Prune passes where that pays, all, each both ways for measurement, or none."
    )

    @model_validator(mode="after")
    def _one_process_holds_the_target(self) -> Self:
        for name in ("space_adapter", "early_head"):
            if getattr(self, name) and self.tensor_parallel > 1:
                raise ValueError(f"{name.upper()} needs a target that one process holds: TENSOR_PARALLEL must be 1")
        return self
