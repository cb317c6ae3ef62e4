"""The baselines: `transformers` on the same checkpoints in this process, one stream or many requests at once."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from coppice.completion import Completion, PassTiming, Speculation, Timing, Usage
from coppice.lab.bench.client import ASSISTED, TRANSFORMERS, Answer, Batch, Delta, Fate, Task
from coppice.lab.bench.harness.experiment import BenchmarkError

LOOKUP = f"{TRANSFORMERS}-lookup"
# Tokens of a draft of prompt lookup; transformers' own default where it looks up by itself.
LOOKUP_TOKENS = 10
# transformers' own default for a page of its cache, in tokens.
PAGE_TOKENS = 256
# Tokens of one of its passes: what one of ours takes, a chunk of prompt and every other sequence.
MAX_BATCH_TOKENS = 576

# The library's own annotations are incomplete; what we hand on has a type again.
_library: Any = transformers
# The number of threads is one of the thread that computes, which is therefore always the same.
_COMPUTING = ThreadPoolExecutor(1, "transformers")


def load_model(model_dir: Path, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A checkpoint in a dtype.

    Raises BenchmarkError if there is no usable checkpoint.
    """
    try:
        model: PreTrainedModel = _library.AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=dtype,
            local_files_only=model_dir.is_dir(),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"cannot load {model_dir}: {error}") from error
    model.train(False)
    return model


class Library(ABC):
    """One way in which transformers complete tasks."""

    def __init__(self, name: str, note: str, target: PreTrainedModel, threads: int) -> None:
        self.name, self.note = name, note
        self._target: Any = target
        self._threads = threads
        # The checkpoint's own settings would silently join ours: an EOS, for example.
        target.generation_config = _library.GenerationConfig()

    async def complete(self, tasks: Sequence[Task]) -> Batch:
        """Complete tasks of the same length, all at once. Raises BenchmarkError if the library lost a request."""
        return await asyncio.get_running_loop().run_in_executor(_COMPUTING, self._run, tasks)

    def _run(self, tasks: Sequence[Task]) -> Batch:
        torch.set_num_threads(self._threads)
        return self._complete(tasks)

    @abstractmethod
    def _complete(self, tasks: Sequence[Task]) -> Batch: ...


def _batch(tasks: Sequence[Task], token_ids: Sequence[Sequence[int]], wall_s: float) -> Batch:
    """All answers come at once."""
    ended = zip(tasks, token_ids, strict=True)
    return Batch(tuple(Answer(task, 0.0, 0.0, wall_s, Fate.COMPLETED, tuple(ids)) for task, ids in ended))


class Generate(Library):
    """`generate` on a target, one request at a time: plain, with prompt lookup, or with an assistant model."""

    def __init__(
        self,
        target: PreTrainedModel,
        threads: int,
        assistant: PreTrainedModel | None = None,
        name: str = TRANSFORMERS,
        *,
        lookup: bool = False,
    ) -> None:
        note = f"transformers generate, {dtype_name(target)}, dynamic cache, sdpa attention"
        self._options: dict[str, Any] = {}
        if lookup:
            self._options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS
            name = LOOKUP
            note += f", prompt_lookup_num_tokens={LOOKUP_TOKENS}"
        if assistant is not None:
            # Number and schedule of the assistant's tokens stay as the checkpoint and the library have them.
            assert assistant.generation_config is not None
            assistant.generation_config.eos_token_id = None
            self._options["assistant_model"] = assistant
            name = ASSISTED
            note = f"transformers assisted generation, {dtype_name(target)}, {_assistant_settings(assistant)}"
        super().__init__(name, note, target, threads)

    @torch.inference_mode()
    def _complete(self, tasks: Sequence[Task]) -> Batch:
        """One task; torch's global generator is seeded with the task's seed."""
        [task] = tasks
        input_ids = torch.tensor([task.prompt_ids])
        first_token = _FirstTokenClock()
        torch.manual_seed(task.seed)
        with _timed_passes(self._target) as times:
            start = time.perf_counter()
            output = self._target.generate(
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=_generation_config(task),
                streamer=first_token,
                **self._options,
            )
            token_ids = tuple(output[0, input_ids.shape[1] :].tolist())
            wall_s = time.perf_counter() - start
        passes = tuple(PassTiming(rows, len(each), sum(each)) for rows, each in sorted(times.items()))
        counts = Speculation(sum(one.count for one in passes))
        timing = Timing(forward_ms=sum(one.total_ms for one in passes), passes=passes)
        completion = Completion("", task.seed, "", token_ids, "length", None, Usage(), counts, timing)
        deltas = (Delta(first_token.time - start, 1),)
        answer = Answer(
            task, 0.0, 0.0, wall_s, Fate.COMPLETED, token_ids, deltas, completion=completion, counts_drafts=False
        )
        return Batch((answer,))


class BatchedGenerate(Library):
    """`generate` over one batch, prompts padded on the left."""

    def __init__(self, target: PreTrainedModel, threads: int) -> None:
        note = f"transformers generate, one padded batch, {dtype_name(target)}, dynamic cache, sdpa attention"
        super().__init__("transformers-batched", note, target, threads)

    @torch.inference_mode()
    def _complete(self, tasks: Sequence[Task]) -> Batch:
        start = time.perf_counter()
        width = max(len(task.prompt_ids) for task in tasks)
        input_ids = torch.zeros(len(tasks), width, dtype=torch.long)
        mask = torch.zeros_like(input_ids)
        for row, task in enumerate(tasks):
            input_ids[row, width - len(task.prompt_ids) :] = torch.tensor(task.prompt_ids)
            mask[row, width - len(task.prompt_ids) :] = 1
        output = self._target.generate(
            input_ids, attention_mask=mask, generation_config=_exact_greedy(tasks[0].max_tokens)
        )
        return _batch(tasks, output[:, width:].tolist(), time.perf_counter() - start)


class ContinuousBatching(Library):
    """transformers' own continuous batching."""

    def __init__(self, target: PreTrainedModel, threads: int, longest: int) -> None:
        """`longest` is the most tokens that a prompt and its completion have together."""
        note = (
            f"transformers generate_batch, {dtype_name(target)}, paged cache with room for all requests, "
            f"at most {MAX_BATCH_TOKENS} tokens a pass"
        )
        super().__init__("transformers-continuous", note, target, threads)
        self._pages = -(-longest // PAGE_TOKENS)
        self._concurrency = 0

    def _complete(self, tasks: Sequence[Task]) -> Batch:
        """The first call for a number of tasks sets the cache up."""
        if len(tasks) != self._concurrency:
            if self._concurrency:
                self._target.destroy_cached_continuous_batching_manager()
            self._concurrency = len(tasks)
        config = _library.ContinuousBatchingConfig(
            num_blocks=self._pages * len(tasks) + 1,
            max_batch_tokens=MAX_BATCH_TOKENS,
            page_size=PAGE_TOKENS,
            # Prompts come again, run after run.
            allow_block_sharing=False,
        )
        start = time.perf_counter()
        outputs: dict[str, Any] = self._target.generate_batch(
            [list(task.prompt_ids) for task in tasks],
            generation_config=_exact_greedy(tasks[0].max_tokens),
            continuous_batching_config=config,
            persistent_manager=True,
        )
        wall_s = time.perf_counter() - start
        if len(outputs) != len(tasks):
            raise BenchmarkError(f"{self.name}: {len(outputs)} of {len(tasks)} requests came back")
        return _batch(tasks, [output.generated_tokens for output in outputs.values()], wall_s)


def quiet_transformers() -> None:
    """Keep the library's own log and progress bars out of the table."""
    _library.logging.set_verbosity_error()
    _library.logging.disable_progress_bar()
    # Continuous batching has a log of its own, and sets its level when it is imported.
    importlib.import_module("transformers.generation.continuous_batching")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


def dtype_name(model: PreTrainedModel) -> str:
    """Name of a model's dtype, as in the verifier's settings."""
    return str(model.dtype).removeprefix("torch.")


def top_two_gap(target: PreTrainedModel, context: Sequence[int]) -> tuple[float, tuple[int, int]]:
    """How far apart the target's two best logits are after `context`, and their token ids."""
    with torch.inference_mode():
        logits = target(input_ids=torch.tensor([list(context)])).logits[0, -1].double()
    values, token_ids = logits.topk(2)
    first, second = token_ids.tolist()
    return float(values[0] - values[1]), (first, second)


def _generation_config(task: Task) -> Any:
    if task.temperature == 0:
        return _library.GenerationConfig(max_new_tokens=task.max_tokens, do_sample=False)
    # The library's default of top-k is 50, which would make it another distribution than ours.
    options = {"temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    return _library.GenerationConfig(max_new_tokens=task.max_tokens, do_sample=True, **options)


def _exact_greedy(max_tokens: int) -> Any:
    # No end of sequence: the length is exact. The padding is masked, so that any token will do.
    return _library.GenerationConfig(max_new_tokens=max_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)


def _assistant_settings(assistant: PreTrainedModel) -> str:
    config = assistant.generation_config
    assert config is not None
    defaults = config._get_default_generation_params()
    names = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
    chosen = {name: getattr(config, name, None) for name in names}
    return ", ".join(f"{name}={defaults.get(name) if value is None else value}" for name, value in chosen.items())


class _FirstTokenClock(BaseStreamer):
    """Notes when the first new token arrives; the first call carries the prompt."""

    def __init__(self) -> None:
        self.time = 0.0
        self._num_calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._num_calls += 1
        if self._num_calls == 2:
            self.time = time.perf_counter()

    def end(self) -> None:
        pass


@contextlib.contextmanager
def _timed_passes(model: PreTrainedModel) -> Iterator[dict[int, list[float]]]:
    """Milliseconds of every forward pass of a model while the context is open, by rows."""
    times: dict[int, list[float]] = defaultdict(list)
    start = 0.0

    def before(*_: object) -> None:
        nonlocal start
        start = time.perf_counter()

    def after(_model: object, _args: object, kwargs: dict[str, Any], _output: object) -> None:
        times[kwargs["input_ids"].shape[1]].append(1000 * (time.perf_counter() - start))

    hooks = model.register_forward_pre_hook(before), model.register_forward_hook(after, with_kwargs=True)
    try:
        yield times
    finally:
        for hook in hooks:
            hook.remove()
