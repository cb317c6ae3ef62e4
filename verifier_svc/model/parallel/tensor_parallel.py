"""Tensor parallelism: ranks, and loading of their parts.

Partitioning and all-reduces follow transformers' plan of the architecture (Megatron-LM's columns and rows). Sums over
ranks have another order than in one process, so logits differ by rounding; batch invariance is probed at start as
usual.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils.import_utils import is_accelerate_available

from coppice.checkpoints.files import refuse_unsuitable
from coppice.core.errors import IncompatibleError
from verifier_svc.config import VerifierConfig
from verifier_svc.model.parallel.pass_message import PassStep, decode, encode
from verifier_svc.model.parallel.sharded_target import Ranks, refuse_uneven_heads
from verifier_svc.model.parallel.worker_processes import PassReader, Workers

logger = logging.getLogger(__name__)

# Ranks read from one disk, and the last may be far behind the first.
LOAD_TIMEOUT_S = 1800.0
_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@contextlib.contextmanager
def leading(config: VerifierConfig) -> Iterator[Ranks]:
    """Rank 0: starts the other ranks, and stops them at the end of the context.

    Raises:
        IncompatibleError: the target cannot be partitioned this way, or this machine lacks a requirement.
    """
    _refuse_unable(config)
    with tempfile.TemporaryDirectory(prefix="coppice-ranks-") as directory, contextlib.ExitStack() as stack:
        workers = Workers(config.tensor_parallel, Path(directory), config.collective_timeout_s)
        stack.callback(_leave)
        stack.callback(workers.stop)

        def share(step: PassStep) -> PassStep:
            workers.send(encode(step))
            return step

        try:
            meet = _join(0, Path(directory), config)
            logger.info("the target is held by %d processes", config.tensor_parallel)
            yield Ranks(config.tensor_parallel, share, meet, workers.fail)
        except RuntimeError as error:  # usually a rank that is gone or late
            workers.fail(str(error))


@contextlib.contextmanager
def following(rank: int, directory: Path, reader: PassReader, config: VerifierConfig) -> Iterator[Ranks]:
    """Another rank, which gets passes from rank 0 through `reader`."""
    meet = _join(rank, directory, config)

    def share(_: PassStep) -> PassStep:
        message = reader.next()
        if message is None:
            raise ConnectionError("rank 0 is gone")
        return decode(message)

    yield Ranks(config.tensor_parallel, share, meet, logger.error)
    _leave()


def load_part(model: str, dtype: torch.dtype, ranks: Ranks) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Load this rank's part of a checkpoint, partitioned by transformers' plan; nothing else is read.

    Also returns the loading info of `from_pretrained`, which is the same for every rank.

    Raises:
        ValueError: there is no plan for the architecture.
    """
    plan = DistributedConfig(tp_size=ranks.size, tp_plan="auto")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=dtype,
        use_safetensors=True,
        trust_remote_code=False,
        distributed_config=plan,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    ranks.meet()
    part, found = loaded
    return part, found


def on_any_rank(flags: list[bool], device: torch.device) -> list[bool]:
    """Flags set on any rank; a collective of all ranks."""
    together = torch.tensor(flags, dtype=torch.uint8, device=device)
    dist.all_reduce(together, dist.ReduceOp.MAX)
    return [bool(flag) for flag in together.tolist()]


def _refuse_unable(config: VerifierConfig) -> None:
    if not is_accelerate_available():
        raise IncompatibleError(
            "TENSOR_PARALLEL needs the package accelerate; in the checkout: "
            ".venv/bin/python -m pip install -e '.[parallel]'"
        )
    if _uses_cuda(config):
        if torch.cuda.device_count() < config.tensor_parallel:
            raise IncompatibleError(
                f"TENSOR_PARALLEL is {config.tensor_parallel}, but there are {torch.cuda.device_count()} CUDA devices"
            )
    elif torch.accelerator.is_available():
        # transformers would always use the accelerator.
        raise IncompatibleError("TENSOR_PARALLEL on CPUs needs accelerators to be hidden (CUDA_VISIBLE_DEVICES='')")
    refuse_unsuitable(config.model, transformers)
    model_config = AutoConfig.from_pretrained(config.model, trust_remote_code=False)
    refuse_uneven_heads(model_config.get_text_config(), config.tensor_parallel)


def _uses_cuda(config: VerifierConfig) -> bool:
    return config.device == "cuda" or (config.device == "auto" and torch.cuda.is_available())


def _join(rank: int, directory: Path, config: VerifierConfig) -> Callable[[], None]:
    """Join the process group; returns a function that waits until all ranks have loaded."""
    # Loopback: ranks are on one machine, and its host name may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)
    size = config.tensor_parallel
    store = dist.FileStore(str(directory / "store"), size)  # type: ignore[attr-defined]
    _meet("started", store, rank, size)
    uses_cuda = _uses_cuda(config)
    if uses_cuda:
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if uses_cuda else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=config.collective_timeout_s),
    )
    return functools.partial(_meet, "loaded", store, rank, size)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def _meet(place: str, store: Any, rank: int, size: int) -> None:
    """Wait until every rank has reached `place`."""
    store.set(f"{place}/{rank}", "here")
    store.wait([f"{place}/{other}" for other in range(size)], timedelta(seconds=LOAD_TIMEOUT_S))
