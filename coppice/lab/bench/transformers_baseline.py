"""The baselines: `transformers` generation, plain and assisted, on the same checkpoints in this process."""

from __future__ import annotations

import importlib
import logging
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from coppice.lab.bench.contenders import Completion, PassTime, Task
from coppice.lab.bench.harness.experiment import BenchmarkError

# The library's own annotations are incomplete; what we hand on has a type again.
_library: Any = transformers


def load_model(model_dir: Path) -> PreTrainedModel:
    """A checkpoint in float32, which is what the verifier computes in on a CPU.

    Raises:
        BenchmarkError: there is no usable checkpoint.
    """
    try:
        model: PreTrainedModel = _library.AutoModelForCausalLM.from_pretrained(
            model_dir,
            dtype=torch.float32,
            local_files_only=model_dir.is_dir(),
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError) as error:
        raise BenchmarkError(f"cannot load {model_dir}: {error}") from error
    model.train(False)
    return model


class TransformersContender:
    """`generate` on a target, with an assistant model where one is given."""

    def __init__(self, name: str, target: PreTrainedModel, assistant: PreTrainedModel | None = None) -> None:
        self.name = name
        self._target = target
        set_aside_generation_config(target)
        self._options: dict[str, Any] = {}
        self.note = "transformers generate, float32, dynamic cache, sdpa attention"
        if assistant is not None:
            # Number and schedule of the assistant's tokens stay as the checkpoint and the library have them.
            assert assistant.generation_config is not None
            assistant.generation_config.eos_token_id = None
            self._options["assistant_model"] = assistant
            self.note = f"transformers assisted generation, {_assistant_settings(assistant)}"

    def complete(self, task: Task) -> Completion:
        """Complete one task; torch's global generator is seeded with the task's seed."""
        input_ids = torch.tensor([task.prompt_ids])
        first_token = _FirstTokenClock()
        torch.manual_seed(task.seed)
        with _ForwardClock(self._target) as forward, torch.inference_mode():
            start = time.perf_counter()
            output: Any = self._target.generate(  # type: ignore[operator]
                input_ids,
                attention_mask=torch.ones_like(input_ids),
                generation_config=_generation_config(task),
                streamer=first_token,
                **self._options,
            )
            token_ids = tuple(output[0, input_ids.shape[1] :].tolist())
            wall_s = time.perf_counter() - start
        return Completion(
            token_ids=token_ids,
            wall_s=wall_s,
            ttft_s=first_token.time - start,
            num_rounds=forward.num_passes,
            forward_s=forward.total_s,
            passes=forward.passes,
        )


def set_aside_generation_config(model: PreTrainedModel) -> None:
    """Forget the checkpoint's own settings, which would silently join ours: an EOS, for example."""
    model.generation_config = _library.GenerationConfig()


def quiet_transformers() -> None:
    """Keep the library's own log and progress bars out of the table."""
    _library.logging.set_verbosity_error()
    _library.logging.disable_progress_bar()
    # Continuous batching has a log of its own, and sets its level when it is imported.
    importlib.import_module("transformers.generation.continuous_batching")
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)


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
    return _library.GenerationConfig(
        max_new_tokens=task.max_tokens,
        do_sample=True,
        temperature=task.temperature,
        # The library's default is 50, which would make it another distribution than ours.
        top_k=0,
        top_p=1.0,
    )


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


class _ForwardClock:
    """Times every forward pass of a model between enter and exit."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._times: dict[int, list[float]] = defaultdict(list)
        self._start = 0.0

    @property
    def num_passes(self) -> int:
        return sum(len(times) for times in self._times.values())

    @property
    def total_s(self) -> float:
        return sum(sum(times) for times in self._times.values())

    @property
    def passes(self) -> dict[int, PassTime]:
        return {rows: PassTime(len(times), sum(times)) for rows, times in sorted(self._times.items())}

    def __enter__(self) -> _ForwardClock:
        self._hooks = (
            self._model.register_forward_pre_hook(self._before),
            self._model.register_forward_hook(self._after, with_kwargs=True),
        )
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, *_: object) -> None:
        self._start = time.perf_counter()

    def _after(self, _model: object, _args: object, kwargs: dict[str, Any], _output: object) -> None:
        self._times[kwargs["input_ids"].shape[1]].append(time.perf_counter() - self._start)
