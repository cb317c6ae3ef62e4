"""What a target is served in: chosen by the checkpoint and the processor, told with fingerprints, right in itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from coppice.checkpoints.quantization import quantize_linears
from coppice.core.errors import IncompatibleError
from coppice.core.tree import chain
from coppice.kernels.cpu.vector_code import HAS_WIDE_REGISTERS
from tests.tiny_checkpoint import tiny_llama, write_tiny_llama
from verifier_svc.config import VerifierConfig
from verifier_svc.engine.kv_cache import SequenceCache
from verifier_svc.engine.pass_plan import SequenceRows
from verifier_svc.model import precision
from verifier_svc.model.loading import load_probed_target
from verifier_svc.model.precision import chosen_dtype, round_weights, serving_fingerprint, weights_fingerprint
from verifier_svc.model.target_model import TargetModel

# The first test of a kind compiles all layers.
pytestmark = pytest.mark.timeout(400)

CPU, GPU = torch.device("cpu"), torch.device("cuda")
VOCAB, CONTEXT = 60, 128
SIZES: dict[str, Any] = {"vocab_size": VOCAB, "max_context_tokens": CONTEXT, "hidden_size": 64, "num_hidden_layers": 3}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    write_tiny_llama(tmp_path, **SIZES)
    return tmp_path


@pytest.mark.parametrize(
    ("wanted", "device", "stored", "is_gguf", "may", "multiplies", "expected"),
    [
        ("auto", CPU, torch.bfloat16, False, True, True, torch.bfloat16),
        ("auto", CPU, torch.float32, False, True, True, torch.float32),
        ("auto", CPU, torch.float16, False, True, True, torch.float32),
        ("auto", CPU, torch.float32, True, True, True, torch.bfloat16),
        ("auto", CPU, torch.bfloat16, False, True, False, torch.float32),
        ("auto", CPU, torch.bfloat16, True, False, True, torch.float32),
        ("auto", GPU, torch.float32, False, True, False, torch.bfloat16),
        ("float32", CPU, torch.bfloat16, True, True, True, torch.float32),
        ("float32", GPU, torch.bfloat16, True, True, True, torch.float32),
        ("bfloat16", CPU, torch.float32, False, False, False, torch.bfloat16),
    ],
)
def test_auto_takes_bfloat16_where_it_is_stored_and_multiplied(
    wanted: Any,
    device: torch.device,
    stored: torch.dtype,
    is_gguf: bool,
    may: bool,
    multiplies: bool,
    expected: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model: Any = tiny_llama(vocab_size=VOCAB, max_context_tokens=CONTEXT)
    model.to(stored).save_pretrained(tmp_path)
    if is_gguf:
        file = tmp_path / "model.safetensors"
        save_file(load_file(file), file, {"format": "pt", "source": "gguf"})
    monkeypatch.setattr(precision, "multiplies_bfloat16", lambda: multiplies)
    assert chosen_dtype(wanted, device, str(tmp_path), may_multiply=may) is expected


def test_fingerprints_tell_weights_and_serving_apart() -> None:
    model, other = (tiny_llama(**SIZES, seed=seed) for seed in (0, 1))
    weights = weights_fingerprint(model, "tokenizer")
    assert weights != weights_fingerprint(other, "tokenizer")
    assert weights != weights_fingerprint(model, "another")
    round_weights(model)
    assert weights == weights_fingerprint(model, "tokenizer"), "what they are served in does not matter"
    serving = {
        serving_fingerprint(*arguments, exact=exact)
        for arguments in (
            (weights, torch.float32, "none"),
            (weights, torch.bfloat16, "none"),
            (weights, torch.float32, "int8"),
            ("other", torch.float32, "none"),
        )
        for exact in (False, True)
    }
    assert len(serving) == 8


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_target_says_what_it_is_served_in_and_has_the_tokens_of_that(dtype: Any, checkpoint: Path) -> None:
    """Against transformers in the same numbers: the same tokens, or two that it has as good as equal."""
    config = VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=4, dtype=dtype)
    target, info = load_probed_target(config)
    assert (info.dtype, info.exact) == (dtype, True)
    if target.layers is not None:
        kept = [name for name, weight in target.model.named_parameters() if "proj" in name and weight.numel()]
        assert not kept, "panels are all that is kept of the layers' products"
        if (maps := Path("/proc/self/maps")).is_file():
            assert str(checkpoint) not in maps.read_text(), "nor is the file, of which weights were parts, kept mapped"
    assert info.serving_fingerprint not in ("", info.weights_fingerprint)
    own = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    tokens = [5, 9, 17]
    for token in greedy(target, tokens, 60):
        with torch.inference_mode():
            logits = own(torch.tensor([tokens])).logits[0, -1].float()
        assert logits.max() - logits[token] <= (1e-3 if dtype == "float32" else 0.5)
        tokens.append(token)
    assert verified(target, tokens[:3], tokens[3:]) == tokens[3:], "speculation changes no token"


def test_what_is_stored_in_single_precision_is_served_so(checkpoint: Path) -> None:
    config = VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=4)
    assert load_probed_target(config)[1].dtype == "float32"


def greedy(target: TargetModel, prompt: list[int], count: int) -> list[int]:
    """Tokens one by one."""
    cache = SequenceCache(target.cache, CONTEXT)
    pending, found = list(prompt), []
    for _ in range(count):
        found.append(int(target.forward(target.plan([SequenceRows(cache, pending)]))[0].argmax()))
        cache.keep(range(len(pending)))
        pending = found[-1:]
    cache.release()
    return found


def verified(target: TargetModel, prompt: list[int], tokens: list[int]) -> list[int]:
    """The target's own token at the prompt's end and at each node of a chain of `tokens` but the last."""
    cache = SequenceCache(target.cache, CONTEXT)
    logits = target.forward(target.plan([SequenceRows(cache, prompt, chain(tokens[:-1]))]))
    cache.release()
    return logits.argmax(-1).tolist()[: len(tokens)]


@pytest.mark.skipif(not HAS_WIDE_REGISTERS, reason="layers are compiled for vectors of 512 bits")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_quantised_target_has_the_tokens_of_the_dequantised_one(dtype: Any, checkpoint: Path) -> None:
    """Against transformers on the dequantised weights: the same tokens, or two that it has as good as equal."""
    config = VerifierConfig(
        model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=4, dtype=dtype, quantization="int8"
    )
    target, info = load_probed_target(config)
    plain = load_probed_target(config.model_copy(update={"quantization": "none"}))[1]
    assert (info.quantization, plain.quantization, info.dtype) == ("int8", "none", dtype)
    assert info.weights_fingerprint == plain.weights_fingerprint
    assert info.serving_fingerprint != plain.serving_fingerprint
    own = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    quantize_linears(own)
    tokens = [5, 9, 17]
    for token in greedy(target, tokens, 60):
        with torch.inference_mode():
            logits = own(torch.tensor([tokens])).logits[0, -1].float()
        assert logits.max() - logits[token] <= (1e-3 if dtype == "float32" else 0.5)
        tokens.append(token)
    assert verified(target, tokens[:3], tokens[3:]) == tokens[3:], "speculation changes no token"


def test_layers_that_are_not_compiled_are_not_quantised(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = VerifierConfig(model=str(checkpoint), device="cpu", threads=1, kv_cache_mib=4, quantization="int8")
    monkeypatch.setattr("verifier_svc.model.compiled_layers.HAS_WIDE_REGISTERS", False)
    with pytest.raises(IncompatibleError, match=r"QUANTIZATION is int8, and layers are not compiled: without vectors"):
        load_probed_target(config)
