"""Requests of many kinds, each with what it gets alone: its tokens and the bits of every row of logits behind them."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from coppice.core.sampling import SamplingParams, StoppingOptions
from coppice.core.tokenizer import TargetTokenizer
from tests.unit.verifier_svc.crowd import Case
from verifier_svc.engine.engine import Engine
from verifier_svc.engine.pass_plan import PassPlan
from verifier_svc.engine.scheduler import SchedulerLimits
from verifier_svc.engine.sequence import SequenceKey, SequenceSpec
from verifier_svc.extras.pruning.layers import PrunedForward
from verifier_svc.extras.pruning.rows import survivors_of
from verifier_svc.model.target_model import TargetInfo, TargetModel
from verifier_svc.stream.events import Event, LoadEvent, OutcomeEvent

LogitRows = npt.NDArray[np.float32]

GREEDY = SamplingParams()
# Cases go through these in turn; every third is plain greedy decoding, which transformers can be asked about.
SAMPLING = (
    GREEDY,
    SamplingParams(temperature=0.7, top_p=0.9, seed=1),
    SamplingParams(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=2),
    GREEDY,
    SamplingParams(temperature=1.3, min_p=0.02, presence_penalty=0.5, seed=3),
    SamplingParams(repetition_penalty=1.2, logit_bias={7: 3.0}),
    GREEDY,
    SamplingParams(temperature=1.0, top_k=20, seed=4),
    SamplingParams(temperature=1.0, seed=5),
)
# Beginnings that several prompts share; a block of the cache has 64 tokens.
_SHARED_TOKENS = (0, 64, 70, 140)
_MAX_OWN_TOKENS = 30
MAX_PROMPT = max(_SHARED_TOKENS) + _MAX_OWN_TOKENS
MIN_OUTPUT, MAX_OUTPUT = 12, 100
_ALONE = SchedulerLimits(max_sequences=1, max_queued=1, prefill_chunk=MAX_PROMPT)
# Blocks that the longest case needs alone, with room to spare.
_AMPLE_BLOCKS = 8


@dataclass(frozen=True)
class Reference(Case):
    """A case with the logits that each of its output's tokens was chosen from [output, vocab]."""

    logits: LogitRows = field(default_factory=lambda: np.empty((0, 0), np.float32), repr=False, compare=False)


class Witness:
    """Stands at a target's door and keeps the logits of its last pass."""

    def __init__(self, target: TargetModel) -> None:
        self.target = target
        self._forward = target.forward
        self._logits: LogitRows = np.empty((0, 0), np.float32)
        self._ranges: deque[tuple[int, int]] = deque()
        self._num_passes = 0
        self._num_parts = 0
        # Mask rows of all passes.
        self.num_masks = 0
        self._forward_pruned = target.forward_pruned
        target.forward = self._run  # type: ignore[method-assign]
        target.forward_pruned = self._run_pruned  # type: ignore[method-assign]

    def next_rows(self) -> LogitRows:
        """Rows of the next sequence of the last pass that got any: the root's, then the nodes' [1 + nodes, vocab]."""
        first, last = self._ranges.popleft()
        return self._logits[first:last]

    def take_counts(self) -> tuple[int, int]:
        """Passes since the last call, and how often a part of a prompt was computed in them that had more to come."""
        counts = self._num_passes, self._num_parts
        self._num_passes = self._num_parts = 0
        return counts

    def _run(self, plan: PassPlan) -> Tensor:
        logits = self._forward(plan)
        self._keep(plan, logits)
        return logits

    def _run_pruned(self, plan: PassPlan) -> tuple[Tensor, PrunedForward]:
        """Rows of pruned nodes, which have no logits, become NaN."""
        left, forward = self._forward_pruned(plan)
        logits = left.new_full((len(plan.logit_rows), left.shape[1]), torch.nan)
        for segment, (first, last), (start, stop) in zip(
            forward.plan.segments, plan.logit_ranges, forward.plan.logit_ranges, strict=True
        ):
            if first < last:
                logits[[first, *(first + 1 + node for node in survivors_of(segment))]] = left[start:stop]
        self._keep(plan, logits)
        return left, forward

    def _keep(self, plan: PassPlan, logits: Tensor) -> None:
        self._num_passes += 1
        self.num_masks += 0 if plan.mask_places is None else int((plan.mask_places >= 0).sum())
        self._num_parts += sum(first == last for first, last in plan.logit_ranges)
        self._logits = logits.numpy()
        self._ranges = deque((first, last) for first, last in plan.logit_ranges if first < last)


def draw_references(
    witness: Witness, info: TargetInfo, generator: np.random.Generator, num_cases: int
) -> list[Reference]:
    """Random requests with their outputs by plain decoding alone, nothing shared and every prompt in one pass."""
    witness.target.resize_cache(_AMPLE_BLOCKS, reuses_prefixes=False)
    texts = [_tokens(generator, info.vocab_size, max(_SHARED_TOKENS)) for _ in range(3)]
    references = []
    for number in range(num_cases):
        own = _tokens(generator, info.vocab_size, int(generator.integers(1, _MAX_OWN_TOKENS)))
        prompt = texts[number % len(texts)][: int(generator.choice(_SHARED_TOKENS))] + own
        stopping = StoppingOptions(
            max_tokens=int(generator.integers(MIN_OUTPUT, MAX_OUTPUT)), ignore_eos=bool(generator.integers(4))
        )
        salt = "other" if number % 7 == 0 else ""
        reference = alone(witness, info, Reference(prompt, SAMPLING[number % len(SAMPLING)], stopping, salt))
        if number % 5 == 4:
            reference = _ended_by_text(witness, info, reference)
        references.append(reference)
    return references


def alone(witness: Witness, info: TargetInfo, reference: Reference) -> Reference:
    """The reference with its output, finish and logits by plain decoding with the engine to itself."""
    engine = Engine(witness.target, info, _ALONE, max_nodes=1)
    events: list[Event] = []
    engine.attach(0, events.extend)
    engine.open(SequenceKey(0, 0), SequenceSpec(reference.prompt, reference.sampling, reference.stopping))
    tokens: list[int] = []
    rows: list[LogitRows] = []
    while True:
        engine.step()
        # What the next pass would deliver on its way.
        engine._deliver()
        for event in events:
            assert isinstance(event, OutcomeEvent | LoadEvent), event
            if isinstance(event, OutcomeEvent):
                tokens += event.outcome.token_ids
                rows.append(witness.next_rows()[0].copy())
                if (finish := event.outcome.finish) is not None:
                    return replace(reference, output=tuple(tokens), finish=finish, logits=np.stack(rows))
        events.clear()


@torch.inference_mode()
def generated(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], list[float]]:
    """transformers' own greedy output, EOS or not, and how far the two best logits were apart at each place.

    Without its cache where rope factors depend on the text's length, since its keys would be turned by others, and for
    Nemotron-H, whose steps have a lower bound in prompts alone.
    """
    rope_type = (getattr(model.config, "rope_parameters", None) or {}).get("rope_type")
    result = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        use_cache=rope_type not in ("longrope", "dynamic") and model.config.model_type != "nemotron_h",
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best_two = torch.stack([logits[0].float().topk(2).values for logits in result.logits])
    return result.sequences[0, len(prompt) :].tolist(), (best_two[:, 0] - best_two[:, 1]).tolist()


def _ended_by_text(witness: Witness, info: TargetInfo, reference: Reference) -> Reference:
    """The request again, with a piece of its own output as stop string where that has a text of its own."""
    tokenizer = TargetTokenizer(info.tokenizer_json)
    middle = len(reference.output) // 2
    text = tokenizer.decode(reference.output[middle : middle + 3])
    if not text.strip() or "\ufffd" in text:
        return reference
    stopping = replace(reference.stopping, stop_strings=("never\n", text))
    return alone(witness, info, replace(reference, stopping=stopping))


def _tokens(generator: np.random.Generator, vocab_size: int, count: int) -> tuple[int, ...]:
    return tuple(int(token) for token in generator.integers(3, vocab_size, count))
