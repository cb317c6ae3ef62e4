"""Loads a target: checkpoint, tokenizer, packed weights, tree attention, probes, cache."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from coppice.checkpoints.catalogue import local_model
from coppice.checkpoints.files import refuse_special_files, refuse_unsuitable
from coppice.checkpoints.quantization import INT8, quantize_linears
from coppice.core.errors import IncompatibleError
from coppice.core.tokenizer import fingerprint
from coppice.core.tree import chain
from coppice.heap import release_memory
from coppice.search.transition_scores import TransitionScores
from coppice.usable_cores import usable_cores
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.features import FeatureShape, offered_features
from verifier_svc.engine.kv_cache import BLOCK_SIZE, SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows, padded_sizes
from verifier_svc.extras.head.loading import load_own_head
from verifier_svc.extras.lookup.lookup import LookupSettings
from verifier_svc.extras.pruning.head import load_head
from verifier_svc.extras.pruning.pace import PruningSettings
from verifier_svc.extras.pruning.probe import check_pruning
from verifier_svc.extras.redraft.adapter import Transition, load_adapter
from verifier_svc.extras.redraft.groups import MaskShape
from verifier_svc.extras.redraft.redraft import RedraftSettings, warm_up
from verifier_svc.kernels.base import KernelLimitError, StaticKernel
from verifier_svc.kernels.cpu.attention import CompiledKernel
from verifier_svc.kernels.cpu.even_activations import even_activations
from verifier_svc.kernels.cpu.few_row_products import prefer_panels
from verifier_svc.kernels.cpu.norms import compile_norms
from verifier_svc.kernels.cpu.packed_layers import Pack, pack_linears, packed_for_onednn
from verifier_svc.kernels.cpu.pair_products import PairProduct
from verifier_svc.kernels.cpu.shared_work import SharedThreads
from verifier_svc.layers.alibi import computes_alibi
from verifier_svc.layers.attention_traits import CHUNKED
from verifier_svc.layers.experts import pack_experts
from verifier_svc.layers.registry import recurrent_modules
from verifier_svc.model.checkpoint import load_checkpoint, read_tokenizer, refuse_larger_tokenizer
from verifier_svc.model.compiled_layers import compile_layers
from verifier_svc.model.conformance_probe import ConformanceProbe
from verifier_svc.model.cpu_threads import CpuThreads
from verifier_svc.model.exactness_probe import masks_leave_rows_alone, rows_stand_alone
from verifier_svc.model.made_for import is_made_for
from verifier_svc.model.parallel.sharded_target import Ranks, ShardedTarget
from verifier_svc.model.pass_curve import PassCurve
from verifier_svc.model.pass_graphs import Capture, CudaCapture, PassGraphs
from verifier_svc.model.precision import (
    chosen_dtype,
    multiplies_bfloat16,
    name_of,
    round_weights,
    serving_fingerprint,
    weights_fingerprint,
)
from verifier_svc.model.rope_regimes import position_limit, trained_length
from verifier_svc.model.row_multiple import refine_row_multiple
from verifier_svc.model.target_model import TargetInfo, TargetModel

logger = logging.getLogger(__name__)

# Layer kinds whose state is keys and values, or that have none.
_SUPPORTED_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", CHUNKED, "mlp", "moe"})
# Blocks for the probe; the final number needs the size of a token, known after a pass.
_PROBE_BLOCKS = 16
# States at borders of shared blocks, at least, if they fit.
_LEAST_KEPT = 8
# Longest text that models without keys and values are given blocks for.
_MOST_TOKENS_OF_STATES = 1 << 17
# Upper bound of rounding in the difference of two logits: ten times the largest seen in single precision, a few times
# in other formats.
_NEAR_TIE_GAPS = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.03}
# Passes of up to this many rows are prepared while loading, within a time limit.
_MET_ROWS = 256
_MEETING_LIMIT_S = 5.0
# Size that holds all of the probe's passes.
_PROBE_BUCKET = 128
# Rows of a pass that take about as long as one, see packed_layers.py and pass_shares.py.
_FREE_ROWS = {"cpu": 16, "cuda": 64}
# Relative cost of a row in a small pass if not measured: from one of our CPUs, scaled by free rows for GPUs.
_ROW_COSTS = {"cpu": 0.06, "cuda": 0.015}
_CURVE_LIMIT_S = 2.0
# Nodes of a draft by prompt lookup.
_LOOKUP_NODES = 16
# Rows of the largest measured pass of the curve, and context tokens before it.
_CURVE_ROWS = 24
_CURVE_CONTEXT = 256
# Upper and lower bound of passes per size. The quartile is used: slower passes were delayed, and the very fastest are
# too few to be reproducible.
_MOST_CURVE_TURNS = 24
_FEWEST_CURVE_TURNS = 4


def load_probed_target(config: VerifierConfig, ranks: Ranks | None = None) -> tuple[TargetModel, TargetInfo]:
    """Load the checkpoint of `config`, safetensors only and without remote code, and probe it on random trees.

    With `ranks` this process loads its part, and all ranks must call this together.

    Raises:
        IncompatibleError: the checkpoint may contain code, is damaged or incomplete, or is not a supported causal
        language
            model; its layers cannot be verified as trees; strict mode is required, and this machine's kernels do not
            provide it; or the KV cache is too small for any text.
        OSError: the checkpoint cannot be read.
    """
    config = config.model_copy(update={"model": local_model(config.model, logger.info)})
    device = _device(config.device)
    exact = config.exactness == "strict" or (config.exactness == "auto" and device.type == "cpu")
    transformers_logging.disable_progress_bar()
    refuse_unsuitable(config.model, transformers)
    tokenizer = read_tokenizer(config.model)
    # Adapters and ranks need modules in single precision.
    may_multiply = ranks is None and not config.space_adapter
    dtype = chosen_dtype(config.dtype, device, config.model, may_multiply=may_multiply)
    model = load_checkpoint(config.model, torch.float32 if device.type == "cpu" else dtype, device, ranks)
    refuse_unsupported(model, config)
    # All services hash the checkpoint's own file if it exists, so that versions of transformers agree.
    file = Path(config.model) / "tokenizer.json"
    identity = fingerprint(file.read_bytes() if file.is_file() else tokenizer.json)
    vocab_size: int = model.config.get_text_config().vocab_size
    refuse_larger_tokenizer(config.model, tokenizer.json, vocab_size)
    weights = weights_fingerprint(model, identity)
    _warn_of_other_targets(model, config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    _round_as_served(model, dtype, config.quantization)
    probe = ConformanceProbe(model, vocab_size, dtype=dtype)
    threads = CpuThreads(_requested_threads(config)) if device.type == "cpu" else None
    target, exact = tried_modes(model, probe, config, exact=exact, threads=threads, ranks=ranks)
    bit_exact = exact or rows_stand_alone(target, vocab_size)
    near_tie_gap = 0.0 if exact else config.near_tie_gap or _NEAR_TIE_GAPS[dtype]
    if not exact:
        logger.info("fast mode: near-ties are counted below a logit gap of %g", near_tie_gap)
    redraft = adapted(target, config, vocab_size, exact=exact)
    pruning = with_early_head(target, config, vocab_size, exact=exact, dtype=dtype)
    limit = position_limit(model)
    size_cache(target, config, limit)
    target.record_now()
    _settle(target)
    # Ranks do not transfer hidden states.
    features = offered_features(target) if ranks is None else FeatureShape()
    head = load_own_head(config, model, vocab_size, features, weights)
    release_memory()
    text_config = model.config.get_text_config()
    if (trained := trained_length(model)) is not None:
        logger.warning(
            "rope of type dynamic: requests end at the trained length of %d tokens, beyond which each token changes "
            "all factors",
            trained,
        )
    info = TargetInfo(
        name=Path(config.model).name,
        tokenizer_json=tokenizer.json,
        tokenizer_fingerprint=identity,
        vocab_size=vocab_size,
        hidden_size=text_config.hidden_size,
        max_context_tokens=context_that_fits(
            min(limit, config.max_context_tokens or limit), target.cache.num_blocks, config.max_nodes, redraft
        ),
        eos_token_ids=_eos_token_ids(model),
        exact=exact,
        shared_block_tokens=BLOCK_SIZE if config.prefix_reuse == "on" else 0,
        row_multiple=target.row_multiple,
        bit_exact=bit_exact,
        near_tie_gap=near_tie_gap,
        redraft=None if redraft is None else with_costs(redraft, target, limit),
        lookup=lookup_settings(config),
        head=head,
        pruning=pruning,
        feature_layers=features.layers,
        feature_size=features.size,
        rope_boundary=target.rope_boundary,
        dtype=name_of(dtype),
        num_parameters=num_parameters,
        quantization=config.quantization,
        weights_fingerprint=weights,
        serving_fingerprint=serving_fingerprint(weights, dtype, config.quantization, exact=exact),
        chat_template=tokenizer.chat_template,
        special_tokens=tokenizer.special_tokens,
    )
    return target, info


def _warn_of_other_targets(model: PreTrainedModel, config: VerifierConfig) -> None:
    """Warn of an adapter or an early head that was trained for another target, before weights are packed."""
    for directory in (config.space_adapter, config.early_head):
        if directory:
            refuse_special_files(directory)
            is_made_for(Path(directory), model)


def _settle(target: TargetModel) -> None:
    """Prepare passes of a checked target, and free the weights that it does not keep."""
    if target.layers is not None:
        target.layers.release()
    if target.device.type == "cpu":
        logger.info("prepared %d pass sizes", target.prepare_sizes(_MET_ROWS, _MEETING_LIMIT_S))


def _round_as_served(model: PreTrainedModel, dtype: torch.dtype, quantization: str) -> None:
    """Give a model, which is in single precision on a CPU, the weights that it is served with."""
    if quantization == INT8:
        quantize_linears(model)
    if dtype == torch.bfloat16 and model.device.type == "cpu":
        round_weights(model)


def tried_modes(
    model: PreTrainedModel,
    probe: ConformanceProbe,
    config: VerifierConfig,
    *,
    exact: bool,
    threads: CpuThreads | None,
    ranks: Ranks | None,
) -> tuple[TargetModel, bool]:
    """The model in the fastest mode that passes the probe, and whether it is exact, if requested.

    Raises:
        IncompatibleError: no mode passes, or strict mode is required and not possible.
    """
    vocab_size: int = model.config.get_text_config().vocab_size
    # Adapters and ranks need the modules' own products.
    is_free = ranks is None and not config.space_adapter
    rounds_inputs = is_free and probe.dtype == torch.bfloat16 and multiplies_bfloat16()
    if threads is not None and is_free:
        quantizes = config.quantization == INT8
        target = compiled_target(
            model, probe, vocab_size, threads, exact=exact, rounds_inputs=rounds_inputs, quantizes=quantizes
        )
        if target is not None:
            return target, exact
    if config.quantization == INT8:
        raise IncompatibleError(
            "QUANTIZATION is int8, which needs layers compiled for a CPU, in one process and without SPACE_ADAPTER"
        )
    if threads is not None:
        make_layers_quick(model, exact=exact)
    elif exact and ranks is None:
        _tile_experts(model)
    mode = functools.partial(_probed_mode, model, probe, config, exact=exact, threads=threads, ranks=ranks)
    if threads is not None and rounds_inputs:
        pack_products(model, functools.partial(PairProduct, threads=SharedThreads()))
        try:
            return mode()
        except IncompatibleError as error:
            # Such as of a mixture whose router then chooses other experts.
            logger.info("inputs of products are not rounded to bfloat16: %s", error)
    if threads is not None:
        pack_products(model)
        logger.info("%d layers use panels for products of a few rows", prefer_panels(model, threads.set_for))
    return mode()


def _probed_mode(
    model: PreTrainedModel,
    probe: ConformanceProbe,
    config: VerifierConfig,
    *,
    exact: bool,
    threads: CpuThreads | None,
    ranks: Ranks | None,
) -> tuple[TargetModel, bool]:
    """The model with its modules' products as they are, and whether it is exact, if requested; see `tried_modes`."""
    vocab_size: int = model.config.get_text_config().vocab_size
    target = probed(model, probe, exact=exact, threads=threads, ranks=ranks)
    if exact and not is_exact(target, vocab_size, is_required=config.exactness == "strict"):
        # Not exact: avoid strict mode's cost.
        exact = False
        target = probed(model, probe, exact=False, threads=threads, ranks=ranks)
    if exact and ranks is None:
        refine_row_multiple(target, vocab_size)
    return target, exact


def compiled_target(
    model: PreTrainedModel,
    probe: ConformanceProbe,
    vocab_size: int,
    threads: CpuThreads,
    *,
    exact: bool,
    rounds_inputs: bool,
    quantizes: bool = False,
) -> TargetModel | None:
    """The model with compiled layers, if it is of the family and passes the probe; otherwise it is left unchanged.

    `rounds_inputs` and `quantizes` as in `compile_layers`.

    Raises:
        IncompatibleError: with `quantizes`, why its layers are not compiled.
    """
    if (kernel := compiled_kernel(model)) is None:
        return None
    target = TargetModel(model, exact=exact, num_blocks=_PROBE_BLOCKS, kernel=kernel, threads=threads)
    try:
        compile_layers(target, kernel, rounds_inputs=rounds_inputs, quantizes=quantizes)
        # Sums do not depend on other rows, so no padding is needed.
        target.row_multiple = 1
        probe.check(target)
        if exact and not rows_stand_alone(target, vocab_size):
            raise IncompatibleError("rows have different bits in a batch than alone")
    except IncompatibleError as error:
        if quantizes:
            raise IncompatibleError(f"QUANTIZATION is int8, and layers are not compiled: {error}") from error
        logger.info("layers are not compiled: %s", error)
        target.use_layers(None)
        return None
    threads.use_all_cores()
    logger.info("layers are compiled")
    return target


def probed(
    model: PreTrainedModel,
    probe: ConformanceProbe,
    *,
    exact: bool,
    threads: CpuThreads | None,
    ranks: Ranks | None = None,
) -> TargetModel:
    """The model with the first attention kernel that supports it."""
    new_target = functools.partial(ShardedTarget, ranks=ranks) if ranks else TargetModel
    if kernel := compiled_kernel(model):
        try:
            target = new_target(model, exact=exact, num_blocks=_PROBE_BLOCKS, kernel=kernel, threads=threads)
            probe.check(target)
        except KernelLimitError as error:
            logger.info("attention is not compiled: %s", error)
        else:
            logger.info("attention is compiled")
            return target
    # The Triton kernel does not have the same bits in a tree and in plain decoding.
    if not exact and (target_on_triton := _probed_on_triton(model, probe, new_target, threads)):
        return target_on_triton
    target = new_target(model, exact=exact, num_blocks=_PROBE_BLOCKS, threads=threads)
    probe.check(target)
    return target


def _probed_on_triton(
    model: PreTrainedModel, probe: ConformanceProbe, new_target: Callable[..., TargetModel], threads: CpuThreads | None
) -> TargetModel | None:
    """The model on the Triton kernel, with CUDA graphs if possible; None if the kernel does not support it."""
    if (kernel := triton_kernel(model)) is None:
        return None
    # Imported here: exists if the kernel does.
    from verifier_svc.kernels.triton.attention import TRITON_FAILURES

    try:
        target = new_target(model, exact=False, num_blocks=_PROBE_BLOCKS, kernel=kernel, threads=threads)
        probe.check(target)
    except (IncompatibleError, *TRITON_FAILURES) as error:
        logger.warning("attention does not run in Triton, but in slower tensor operations: %s", error)
        return None
    logger.info("attention runs in Triton")
    # Capture of collectives is untested, and walks over the rows of a pass have no fixed places on the device.
    if new_target is TargetModel and target.recurrent is None:
        record_passes(target, probe, kernel, CudaCapture())
    return target


def record_passes(target: TargetModel, probe: ConformanceProbe, kernel: StaticKernel, capture: Capture) -> None:
    """Enable CUDA graphs of a target's passes, if the replays pass the probe."""
    # One size for all of the probe's passes, so that all but the first are replays.
    graphs = PassGraphs(kernel, capture, (_PROBE_BUCKET,))
    target.record_passes(graphs)
    try:
        probe.check(target)
    except (IncompatibleError, RuntimeError) as error:
        logger.warning("passes are not recorded, which makes small ones slower: %s", error)
        target.record_passes(None)
    else:
        # Failures to capture were logged.
        target.record_passes(PassGraphs(kernel, capture) if graphs.num_recordings else None)


def adapted(target: TargetModel, config: VerifierConfig, vocab_size: int, *, exact: bool) -> RedraftSettings | None:
    """Load the re-draft adapter, if configured; returns its settings.

    Raises:
        IncompatibleError: the adapter does not match the target, or breaks strict mode.
    """
    if not config.space_adapter:
        return None
    adapter = load_adapter(Path(config.space_adapter))
    target.adapt(adapter)
    num_masks = min(config.redraft_tokens or adapter.num_masks, adapter.num_masks)
    if not masks_leave_rows_alone(target, vocab_size, num_masks) and exact:
        raise IncompatibleError(f"with masks, rows of {config.model} have other bits than without: use EXACTNESS=fast")
    free_rows = config.redraft_rows or _FREE_ROWS[target.device.type]
    shape = MaskShape(num_masks, config.redraft_groups)
    logger.info("in-pass re-drafts: %d masks after up to %d nodes", num_masks, config.redraft_groups)
    transition = None
    if (pair := adapter.transition) is not None:
        transition = _transition(pair, target.model, vocab_size)
    nodes = min(config.redraft_nodes, config.max_nodes)
    least = config.redraft_min_probability
    curve = PassCurve.line(_ROW_COSTS[target.device.type])
    settings = RedraftSettings(shape, nodes, free_rows, adapter.sigmas, transition, least, curve)
    warm_up(settings, vocab_size)
    return settings


def lookup_settings(config: VerifierConfig) -> LookupSettings | None:
    """Prompt lookup, unless it is off or the target drafts in a better way."""
    if config.prompt_lookup != "on" or config.space_adapter:
        return None
    return LookupSettings(min(_LOOKUP_NODES, config.max_nodes))


def with_costs(redraft: RedraftSettings, target: TargetModel, max_tokens: int) -> RedraftSettings:
    """Settings with measured costs of rows, if they are used and can be measured in time."""
    if not redraft.min_probability:
        return redraft
    if (curve := measure_curve(target, max_tokens, _CURVE_LIMIT_S)) is None:
        return redraft
    logger.info("passes of 4, 8 and 16 rows take %s of the smallest", [round(curve.at(rows), 2) for rows in (4, 8, 16)])
    return replace(redraft, curve=curve)


def measure_curve(
    target: TargetModel, max_tokens: int, limit_s: float, clock: Callable[[], float] = time.perf_counter
) -> PassCurve | None:
    """Measure durations of a target's passes over one sequence of at most `max_tokens` tokens.

    Sizes alternate. The sequence's keys and values are arbitrary; recurrent states advance over rows of a pass alone.
    None if passes take too long for `limit_s`, or the sequence does not fit.
    """
    sizes = padded_sizes(_CURVE_ROWS, target.row_multiple)
    context = min(_CURVE_CONTEXT, max_tokens - sizes[-1])
    cache = SequenceCache(target.cache, max(1, context + sizes[-1]))
    if context < 1 or cache.num_missing(context + sizes[-1]) > target.cache.num_free_blocks:
        return None
    cache.reserve(context)
    if target.recurrent is not None:
        target.forward(target.plan([SequenceRows(cache, [0] * context, wants_logits=False)]))
    cache.keep(range(context))
    taken_s: list[list[float]] = [[] for _ in sizes]
    started_s = clock()
    turns = 0
    while turns < _MOST_CURVE_TURNS and clock() - started_s < limit_s:
        for at, size in enumerate(sizes):
            plan = target.plan([SequenceRows(cache, [0], chain([0] * (size - 1)))])
            before_s = clock()
            target.forward(plan)
            took_s = clock() - before_s
            # The first turn generates every size's machine code.
            if turns:
                taken_s[at].append(took_s)
            elif took_s * len(sizes) * _FEWEST_CURVE_TURNS > limit_s:
                cache.release()
                return None
        turns += 1
    cache.release()
    if turns < _FEWEST_CURVE_TURNS:
        return None
    return PassCurve.of_sizes(sizes, [sorted(taken)[len(taken) // 4] for taken in taken_s])


def _transition(pair: Transition, model: PreTrainedModel, vocab_size: int) -> TransitionScores:
    """Scores of a token by the preceding one, as a table for each side.

    Raises:
        IncompatibleError: the adapter has other embedding sizes.
    """
    layers: tuple[Any, Any] = model.get_input_embeddings(), model.get_output_embeddings()
    matrices = [matrix.float().numpy() for matrix in (pair.before, pair.behind)]
    tables = [layer.weight[:vocab_size].detach().float().cpu().numpy() for layer in layers]
    try:
        return TransitionScores.of_embeddings(*matrices, *tables)
    except ValueError as error:
        raise IncompatibleError(f"the adapter is not for this target: {error}") from error


def with_early_head(
    target: TargetModel, config: VerifierConfig, vocab_size: int, *, exact: bool, dtype: torch.dtype | None = None
) -> PruningSettings | None:
    """Install the early head, if configured; returns its settings. `dtype` as in `check_pruning`.

    Raises:
        IncompatibleError: the head does not match the target, the target's layers do not support pruning, or strict
        mode
            would break.
    """
    if not config.early_head or config.early_pruning == "off":
        return None
    head = load_head(Path(config.early_head))
    target.install_head(head)
    check_pruning(target, vocab_size, exact=exact, dtype=dtype)
    logger.info("nodes are pruned after layer %d: %s", head.layer, config.early_pruning)
    free_rows = _FREE_ROWS[target.device.type]
    return PruningSettings(head.thresholds, free_rows, target.row_multiple, config.early_pruning)


def is_exact(target: TargetModel, vocab_size: int, *, is_required: bool) -> bool:
    """Whether strict mode is possible; if not, fast mode is used, unless strict is required."""
    if rows_stand_alone(target, vocab_size):
        return True
    reason = "this machine's matrix kernels give a row different bits in a batch than alone"
    if is_required:
        raise IncompatibleError(f"EXACTNESS is strict, but {reason}")
    logger.warning("strict mode is not offered: %s", reason)
    return False


# A prompt token and an output token; with less, every request would be refused.
_LEAST_CONTEXT = 2


def context_that_fits(limit: int, num_blocks: int, max_nodes: int, redraft: RedraftSettings | None) -> int:
    """Longest text, of at most `limit` tokens, that fits `num_blocks` blocks together with a round's rows.

    Raises:
        IncompatibleError: none fits.
    """
    rows = max_nodes + (redraft.shape.max_rows if redraft is not None else 0)
    held = num_blocks * BLOCK_SIZE
    if held - rows >= limit:
        return limit
    if held - rows < _LEAST_CONTEXT:
        raise IncompatibleError(
            f"the KV cache holds {held} tokens and a round may add {rows} rows, which leaves no room for a text: "
            "raise KV_CACHE_MIB or lower MAX_NODES"
        )
    logger.warning(
        "the KV cache holds less than a context of %d tokens: requests are limited to %d", limit, held - rows
    )
    return held - rows


def make_layers_quick(model: PreTrainedModel, *, exact: bool) -> None:
    """Replace a CPU model's norms and activations by faster ones, and for strict mode by even ones."""
    logger.info("compiled %d norms", compile_norms(model))
    if exact:
        even_activations(model)


def pack_products(model: PreTrainedModel, pack: Pack = packed_for_onednn) -> None:
    """Replace the products of a CPU model's linear layers and experts by those of `pack`."""
    logger.info("packed %d mixtures of experts", pack_experts(model, pack))
    logger.info("packed %d linear layers", pack_linears(model, pack))


def _tile_experts(model: PreTrainedModel) -> None:
    """Replace the products of a GPU model's experts by those that do not depend on the rows of a pass."""
    try:
        # Imported here: Triton is optional.
        from verifier_svc.layers.tiled_experts import tile_experts
    except ImportError as error:
        logger.warning("products of experts depend on the rows of a pass: %s", error)
        return
    logger.info("%d mixtures of experts compute in tiles", tile_experts(model))


def compiled_kernel(model: PreTrainedModel) -> CompiledKernel | None:
    """Compiled kernel for a model in single precision on a CPU; None for others."""
    parameter = next(model.parameters())
    if parameter.device.type != "cpu" or parameter.dtype != torch.float32:
        return None
    return CompiledKernel()


def triton_kernel(model: PreTrainedModel) -> StaticKernel | None:
    """Triton kernel for a model on a GPU; None for others, or without Triton."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return None
    try:
        # Imported here: Triton is optional.
        from verifier_svc.kernels.triton.attention import TritonKernel
    except ImportError as error:
        logger.warning("attention does not run in Triton, but in slower tensor operations: %s", error)
        return None
    return TritonKernel(device)


def _requested_threads(config: VerifierConfig) -> int:
    """Threads for every pass; ranks share the machine's cores equally unless set."""
    if config.threads or config.tensor_parallel == 1:
        return config.threads
    return max(1, usable_cores() // config.tensor_parallel)


def allot_states(target: TargetModel, config: VerifierConfig) -> int:
    """Decide on the number of recurrent states, within half of the cache's memory; returns their mebibytes.

    A running sequence takes two: that of its committed tokens, and that after a pass's pending tokens. A quarter as
    many are kept at borders of shared blocks.

    Raises:
        IncompatibleError: not even one sequence fits.
    """
    if target.recurrent is None:
        return 0
    per_state = target.recurrent.bytes_per_state
    most = config.kv_cache_mib * 2**20 // 2 // per_state
    if most < 2:
        raise IncompatibleError(
            f"recurrent states of one sequence take {2 * per_state / 2**20:.1f} MiB, more than half of the KV cache: "
            "raise KV_CACHE_MIB"
        )
    num_running = min(config.max_sequences, most * 4 // 9 or 1)
    if num_running < config.max_sequences:
        logger.warning("recurrent states fit for %d of %d sequences at once", num_running, config.max_sequences)
    num_kept = min(most - 2 * num_running, max(_LEAST_KEPT, num_running // 4)) if config.prefix_reuse == "on" else 0
    target.set_num_states(num_running, num_kept)
    mebibytes = -(-(2 * num_running + num_kept) * per_state // 2**20)
    logger.info("recurrent states of %d sequences and %d borders take %d MiB", num_running, num_kept, mebibytes)
    return mebibytes


def size_cache(target: TargetModel, config: VerifierConfig, limit: int) -> None:
    """Allocate blocks and recurrent states within the cache's memory, for texts of up to `limit` tokens.

    Raises:
        IncompatibleError: the states of one sequence do not fit.
    """
    mebibytes = config.kv_cache_mib - allot_states(target, config)
    target.resize_cache(_cache_blocks(target, mebibytes, limit, config), reuses_prefixes=config.prefix_reuse == "on")


def _cache_blocks(target: TargetModel, mebibytes: int, limit: int, config: VerifierConfig) -> int:
    """Blocks that fit into `mebibytes`; as many as all sequences can need if no layer has keys and values."""
    per_block = target.bytes_per_slot * BLOCK_SIZE
    if per_block == 0:
        return config.max_sequences * -(-(min(limit, _MOST_TOKENS_OF_STATES) + config.max_nodes) // BLOCK_SIZE)
    return max(1, mebibytes * 2**20 // per_block)


def _refuse_with_recurrent_layers(model: PreTrainedModel, config: VerifierConfig) -> None:
    name = f"{type(model).__name__} has recurrent layers, which"
    if config.tensor_parallel > 1:
        raise IncompatibleError(f"{name} run in one process only: TENSOR_PARALLEL must be 1")


def refuse_unsupported(model: PreTrainedModel, config: VerifierConfig) -> None:
    """Raise IncompatibleError for layers of an unknown kind, and for settings that a model's layers do not support."""
    text_config = model.config.get_text_config()
    layer_types = list(getattr(text_config, "layer_types", None) or ())
    unknown = [kind for kind in layer_types if kind not in _SUPPORTED_LAYER_TYPES]
    # Recurrent layers are known by their modules.
    recurrent = recurrent_modules(model)
    if config.eagle_head and (config.space_adapter or config.tensor_parallel > 1 or model.device.type != "cpu"):
        raise IncompatibleError("EAGLE_HEAD is for targets on a CPU, in one process, without SPACE_ADAPTER")
    if recurrent:
        _refuse_with_recurrent_layers(model, config)
    if len(unknown) > len(recurrent):
        raise IncompatibleError(f"{type(model).__name__} has layers of kind {', '.join(sorted(set(unknown)))}")
    if getattr(model.config, "is_encoder_decoder", False):
        raise IncompatibleError(f"{type(model).__name__} is not a decoder-only model")
    uses_biases = getattr(text_config, "alibi", False) or getattr(text_config, "position_embedding_type", "") == "alibi"
    if uses_biases and not computes_alibi(model):
        raise IncompatibleError(f"{type(model).__name__} uses ALiBi positions")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise ValueError("DEVICE is cuda but there is no CUDA device")
    return torch.device(name)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    config = model.generation_config or model.config
    eos = config.eos_token_id if config.eos_token_id is not None else model.config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list | tuple) else (eos,)
