"""The requests of an overload benchmark: prompts and outputs of lognormal lengths."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.lab.bench.contenders import BenchmarkError
from coppice.lab.bench.latency import fit_context
from coppice.lab.bench.load.workload import Workload, lognormal_length
from coppice.lab.bench.prompts import Prompt

# A shorter prompt says too little to go on with.
MIN_PROMPT_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Sizes:
    """Prompts in a target's tokens, and how long outputs are."""

    target: Path
    prompts: tuple[Prompt, ...]
    min_tokens: int = 16
    max_tokens: int = 128
    seed: int = 0

    def workload(self, max_context_tokens: int) -> Workload:
        """Requests that fit the context: each prompt is the end of one that was given.

        Raises:
            BenchmarkError: outputs leave no room for a prompt.
        """
        if self.max_tokens + MIN_PROMPT_TOKENS > max_context_tokens:
            raise BenchmarkError(
                f"--output-tokens {self.max_tokens} leaves no room for a prompt in a context of {max_context_tokens}"
            )
        tokenizer = TargetTokenizer(load_tokenizer_json(self.target))
        encoded = [tokenizer.encode(prompt.text) for prompt in self.prompts]
        fitting, _ = fit_context(encoded, self.max_tokens, max_context_tokens)
        longest = max(map(len, fitting))
        rng = random.Random(self.seed)
        lengths = [lognormal_length(rng, min(MIN_PROMPT_TOKENS, longest), longest) for _ in fitting]
        cut = tuple(tuple(ids[-length:]) for ids, length in zip(fitting, lengths, strict=True))
        return Workload(cut, self.min_tokens, self.max_tokens, 0.0, self.seed, lognormal=True)
