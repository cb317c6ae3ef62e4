"""How a CUDA graph behaves, on a CPU: what was done once is done again, to the same tensors and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from verifier_svc.kernels.triton import attention as triton_attention
from verifier_svc.model.pass_graphs import Outputs

# What a recording on a GPU cannot contain: the host waits for a number.
_HOST_READS = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::nonzero"}
_KERNELS = ("store_rows", "attend_items", "join_parts")


class Tape(TorchDispatchMode):
    """Records tensor operations, and launches of the kernels that `record_launches` has wrapped."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func._schema.name in _HOST_READS:
            raise RuntimeError(f"{func} cannot be recorded")
        options = dict(kwargs or {})
        result = func(*args, **options)
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, options))}
        # Views and what is done in place show up by themselves.
        new = [index for index, leaf in enumerate(_tensors(result)) if leaf.untyped_storage().data_ptr() not in given]
        kept = _tensors(result)

        def again() -> None:
            repeated = _tensors(func(*args, **options))
            for index in new:
                kept[index].copy_(repeated[index])

        self.steps.append(again)
        return result


class TapeCapture:
    """`Capture` by tape. What a replay does not write again stays as the recording left it."""

    def __init__(self) -> None:
        self.num_replays = 0
        self.tape: Tape | None = None

    def __call__(self, function: Callable[[], Outputs]) -> tuple[Callable[[], object], Outputs]:
        """As `Capture` has it."""
        # As on a GPU: what is made at the first call only is not part of the recording.
        function()
        tape = self.tape = Tape()
        try:
            with tape:
                result = function()
        finally:
            self.tape = None

        def replay() -> None:
            self.num_replays += 1
            for step in tape.steps:
                step()

        return replay, result

    def record_launches(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put launches of the kernels on the tape, too."""
        for name in _KERNELS:
            monkeypatch.setattr(triton_attention, name, _Launcher(getattr(triton_attention, name), self))


class _Launcher:
    def __init__(self, kernel: Any, capture: TapeCapture) -> None:
        self._kernel = kernel
        self._capture = capture

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **settings: Any) -> None:
            def again() -> None:
                with _disable_current_modes():
                    self._kernel[grid](*arguments, **settings)

            again()
            if self._capture.tape is not None:
                self._capture.tape.steps.append(again)

        return launch


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
