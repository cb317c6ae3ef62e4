"""The drafter's settings, read once from the environment."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from coppice.core.denoising import MAX_BLOCK_TOKENS, MAX_DENOISING_STEPS
from coppice.core.tree import MAX_TREE_NODES
from coppice.net.service_settings import ServiceSettings
from coppice.settings import LAB, Mebibytes, Nodes, Rows, Rule, Seconds, Switch, Tokens
from drafter_svc.drafters.kinds import KINDS
from drafter_svc.model.draft_context import LEAST_CONTEXT

ON = "on"
# A terabyte; larger values are typing errors.
MAX_PREFIX_MIB = 1024 * 1024
# Fraction of a drafter's positions for the context.
CONTEXT_SHARE = 0.875


class DrafterConfig(ServiceSettings):
    """Settings of a drafter process."""

    model: Annotated[str, Rule("a checkpoint directory or hub id", bool)] = Field(
        description="The drafter's checkpoint: a directory or a hub id."
    )
    drafter_kind: Annotated[str, Rule(f"one of {', '.join(sorted(KINDS))}", KINDS.__contains__)] = Field(
        default="small-lm", description="Kind of the drafter."
    )
    target_model: str = Field(
        default="",
        description="The target's checkpoint, whose embeddings and output layer an eagle drafter uses: a directory, a "
        "GGUF file or a short name.",
    )
    device: Literal["auto", "cpu", "cuda"] = Field(
        default="auto", description="Where the drafter runs; `auto` takes a GPU if there is one."
    )
    # Steps of a small drafter are too short for a barrier between threads, and the verifier needs the other cores.
    threads: int = Field(default=0, ge=0, le=1024, description="CPU threads of a forward step; 0 takes one.")
    # On cores shared with the verifier a drafter should yield: reading a prompt while the target does delays that pass.
    niceness: int = Field(
        default=0,
        ge=0,
        le=19,
        description="How far the process yields to others on its machine, as `nice` counts.",
    )
    grace_s: Seconds = Field(default=5.0, ge=0, description="How long streams may go on after SIGTERM.")

    max_nodes: Nodes = Field(
        default=64, ge=1, le=MAX_TREE_NODES, description="Most nodes of a tree, whatever a request asks for."
    )
    max_sequences: int = Field(default=256, ge=1, description="Most sequences held at once, over all streams.")
    # A token of the bundled drafter takes 2 KiB.
    max_cached_tokens: Tokens = Field(
        default=131_072,
        ge=0,
        description="Tokens whose keys and values are kept, over all sequences; 0 keeps all.",
    )
    prefix_mib: Mebibytes = Field(
        default=64,
        ge=0,
        le=MAX_PREFIX_MIB,
        description="Memory for what prompts of one `cache_salt` that begin alike reuse; 0 keeps nothing.",
    )
    draft_context: Annotated[
        Tokens, LAB, Rule(f"0 or at least {LEAST_CONTEXT}", lambda tokens: tokens == 0 or tokens >= LEAST_CONTEXT)
    ] = Field(
        default=0,
        description="Most tokens of a sequence that are read, the first few and the latest; 0 takes what the "
        "checkpoint is good for.",
    )
    draft_batch: Annotated[int, LAB] = Field(
        default=0, ge=0, le=1024, description="Most sequences that share a drafting pass; 0 tries it out at start."
    )

    draft_width: Annotated[Rows, LAB] = Field(
        default=4, ge=1, le=256, description="Rows of a forward step of the search."
    )
    draft_steps: Annotated[int, LAB] = Field(
        default=12, ge=0, le=256, description="Most forward steps of the search after the root."
    )
    draft_min_gain: Annotated[float, LAB] = Field(
        default=0.2,
        ge=0,
        le=1,
        description="Least expected number of further accepted tokens that a step must promise.",
    )
    # Cost of a row in tokens. With the bundled pair a row takes about 0.4 ms of the target's pass and 0.1 ms of the
    # draft, and a token 4 ms. Padding rows are free: nodes down to a quarter of this fill them.
    draft_min_probability: Annotated[float, LAB] = Field(
        default=0.12, ge=0, lt=1, description="Least probability of a node's whole path."
    )
    draft_children: Annotated[int, LAB] = Field(
        default=16, ge=1, le=256, description="Most children of a node that are considered; 1 drafts chains."
    )
    # On the verifier's processor the steps slow its passes by as much as drafts ahead gain, even with a core each.
    draft_ahead: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Draft for likely outcomes while a tree is verified; `auto`: on a GPU, or with `NICENESS` 0.",
    )
    draft_ahead_steps: Annotated[int, LAB] = Field(
        default=4, ge=0, le=256, description="Most forward steps of a round that are taken for it."
    )
    coupling: Annotated[Switch, LAB] = Field(
        default="on",
        description="Choose children with the request's noise, or by the drafter's own probabilities alone.",
    )
    online_calibration: Annotated[Switch, LAB] = Field(
        default="on", description="Send the acceptance observed for similar nodes, or the drafter's own probabilities."
    )

    semi_ar_masks: Annotated[int, LAB] = Field(
        default=0, ge=0, le=64, description="Of a semi-ar drafter: most masks of a block; 0 takes all."
    )
    # Two passes over 4 tokens were as quick as any, and had 9 to 23 % more tokens accepted than one.
    diffusion_steps: Annotated[int, LAB] = Field(
        default=2, ge=1, le=MAX_DENOISING_STEPS, description="Of a diffusion drafter: passes over the block."
    )
    diffusion_max_steps: Annotated[int, LAB] = Field(
        default=8,
        ge=1,
        le=MAX_DENOISING_STEPS,
        description="Of a diffusion drafter: most passes that a request may ask for.",
    )
    diffusion_block: Annotated[Tokens, LAB] = Field(
        default=0,
        ge=0,
        le=MAX_BLOCK_TOKENS,
        description="Of a diffusion drafter: tokens of the block; 0 takes the trained length, up to 4.",
    )

    # Rows of a step share the reading of weights, which takes most of its time.
    eagle_width: Annotated[Rows, LAB] = Field(
        default=8, ge=1, le=16, description="Of an eagle drafter: rows of a step of the search."
    )
    eagle_depth: Annotated[int, LAB] = Field(
        default=7, ge=1, le=16, description="Of an eagle drafter: most tokens of a path."
    )
    eagle_min_gain: Annotated[float, LAB] = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Of an eagle drafter: least expected number of further accepted tokens that a step must promise.",
    )
    eagle_min_probability: Annotated[float, LAB] = Field(
        default=0.01, ge=0, lt=1, description="Of an eagle drafter: least probability of a node's whole path."
    )

    @property
    def num_threads(self) -> int:
        """CPU threads of a forward pass."""
        return self.threads or 1

    def ahead_steps(self, *, on_gpu: bool) -> int:
        """Most forward steps per round for drafting ahead; 0 if it is off."""
        has_own_cores = self.niceness == 0 or on_gpu
        is_on = self.draft_ahead == "on" or (self.draft_ahead == "auto" and has_own_cores)
        return self.draft_ahead_steps if is_on else 0

    def context_tokens(self, measured: int, max_positions: int) -> int:
        """Most tokens of a sequence to read, for a model with `max_positions`; 0 if no limit can be kept.

        `measured` is the context that the checkpoint was trained for, 0 if unknown. Positions are reserved for trees.
        """
        most = int(CONTEXT_SHARE * max_positions)
        most = min(self.draft_context or measured or most, most)
        return most if most >= LEAST_CONTEXT else 0
