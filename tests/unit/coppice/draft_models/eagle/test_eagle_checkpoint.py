"""Which checkpoints of EAGLE-3 drafters are loaded, and what is said of those that are not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from coppice.core.errors import IncompatibleError
from coppice.core.feature_layers import default_feature_layers
from coppice.draft_models.eagle.checkpoint import load_eagle, load_eagle_calibration
from coppice.draft_models.eagle.forward import RotaryTable
from coppice.draft_models.eagle.target_rows import TargetRows, read_target_rows
from drafter_svc.config import DrafterConfig
from drafter_svc.drafters.eagle.drafter import Eagle
from drafter_svc.drafters.registry import load_drafter
from tests.eagle_checkpoints import eagle_settings, eagle_tensors, write_eagle, write_tiny_eagle
from tests.unit.coppice.draft_models.eagle.conftest import VOCAB

Settings = dict[str, Any]
Tensors = dict[str, Tensor]
LAYER = "layers.0."


@pytest.fixture(scope="module")
def rows(eagle_target: Path) -> TargetRows:
    return read_target_rows(str(eagle_target))


def test_a_drafter_has_the_target_s_tables_tokenizer_and_fingerprint(eagle_target: Path, tmp_path: Path) -> None:
    write_tiny_eagle(tmp_path, eagle_target, target="fingerprint", sigmas={"0": [1, 2]}, acceptance_by_rank=[0.5, 0.1])
    config = DrafterConfig(model=str(tmp_path), drafter_kind="eagle", device="cpu", target_model=str(eagle_target))
    drafter = load_drafter(config)
    assert isinstance(drafter, Eagle)
    info = drafter.info
    assert (info.kind, info.vocab_size, info.feature_size, info.feature_layers) == ("eagle", VOCAB, 96, (2, 4, 5))
    assert (info.target_weights, info.acceptance_by_rank) == ("fingerprint", (0.5, 0.1))
    small_lm = load_drafter(DrafterConfig(model=str(eagle_target), device="cpu"))
    assert info.tokenizer_fingerprint == small_lm.info.tokenizer_fingerprint


def test_without_tables_and_without_a_target_it_is_refused(eagle_target: Path, tmp_path: Path) -> None:
    write_tiny_eagle(tmp_path, eagle_target)
    with pytest.raises(IncompatibleError, match=r"has no embed_tokens.weight: TARGET_MODEL must name"):
        load_drafter(DrafterConfig(model=str(tmp_path), drafter_kind="eagle", device="cpu"))


def test_a_missing_list_of_layers_is_that_of_the_target(eagle_target: Path, rows: TargetRows, tmp_path: Path) -> None:
    settings = eagle_settings(eagle_target, 24, eagle_aux_hidden_state_layer_ids=None)
    write_eagle(tmp_path, settings, eagle_tensors(settings, with_tables=True))
    assert load_eagle(str(tmp_path), rows).feature_layers == (2, 4, 5)
    with pytest.raises(IncompatibleError, match="does not say which layers it reads"):
        load_eagle(str(tmp_path), None)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [(1, (0, 0, 0)), (2, (1, 1, 1)), (4, (2, 2, 2)), (6, (2, 3, 3)), (30, (2, 15, 27)), (32, (2, 16, 29))],
)
def test_layers_are_low_middle_and_high(layers: int, expected: tuple[int, int, int]) -> None:
    assert default_feature_layers(layers) == expected


def test_a_model_without_layers_has_no_features() -> None:
    with pytest.raises(ValueError, match="at least one layer"):
        default_feature_layers(0)


def test_a_whole_vocabulary_needs_no_map(eagle_target: Path, rows: TargetRows, tmp_path: Path) -> None:
    settings = eagle_settings(eagle_target, VOCAB)
    tensors = eagle_tensors(settings)
    write_eagle(tmp_path, settings, {name: part for name, part in tensors.items() if name not in ("d2t", "t2d")})
    weights = load_eagle(str(tmp_path), rows)
    assert weights.draft_ids.tolist() == list(range(VOCAB))
    assert torch.equal(weights.head, rows.output)


@pytest.mark.parametrize("is_the_target_s", [True, False])
def test_prompts_tokens_have_the_target_s_rows_only_beside_the_target_s_head(
    is_the_target_s: bool, eagle_target: Path, rows: TargetRows, tmp_path: Path
) -> None:
    """A head of its own may score tokens by another measure."""
    settings = eagle_settings(eagle_target, 24)
    tensors = eagle_tensors(settings, with_tables=True)
    if is_the_target_s:
        tensors["lm_head.weight"] = rows.output[torch.arange(24) + tensors["d2t"]].clone()
    write_eagle(tmp_path, settings, tensors)
    assert (load_eagle(str(tmp_path), rows).target_output is not None) == is_the_target_s


Damage = Callable[[Settings, Tensors], object]
REFUSED: dict[str, tuple[Damage, str]] = {
    "a kind of its own": (
        lambda s, t: s.update(speculators_model_type="eagle"),
        "must be eagle3",
    ),
    "no layer": (lambda s, t: s.pop("transformer_layer_config"), "has no transformer_layer_config"),
    "two layers": (lambda s, t: s["transformer_layer_config"].update(num_hidden_layers=2), "has 2 layers"),
    "qwen3": (lambda s, t: s["transformer_layer_config"].update(model_type="qwen3"), "is of a qwen3 layer"),
    "gelu": (lambda s, t: s["transformer_layer_config"].update(hidden_act="gelu"), "activation gelu"),
    "dynamic rope": (
        lambda s, t: s["transformer_layer_config"].update(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
        "rope of type dynamic",
    ),
    "uneven heads": (
        lambda s, t: s["transformer_layer_config"].update(num_key_value_heads=3),
        "4 query heads of 8 numbers on 3 key heads",
    ),
    "layers that are none": (
        lambda s, t: s.update(eagle_aux_hidden_state_layer_ids=[2, -1]),
        r"layers \[2, -1\]",
    ),
    "a layer that the target does not have": (
        lambda s, t: s.update(eagle_aux_hidden_state_layer_ids=[2, 4, 10**9]),
        "reads layer 1000000000, and the target has",
    ),
    "a negative factor of rope": (
        lambda s, t: s["transformer_layer_config"].update(rope_scaling={"rope_type": "linear", "factor": -2.0}),
        "rope whose frequencies are no finite numbers",
    ),
    "a missing matrix": (lambda s, t: t.pop("fc.weight"), r"lacks 1 tensor \(fc.weight\)"),
    "an unknown tensor": (
        lambda s, t: t.update({LAYER + "self_attn.q_norm.weight": torch.ones(8)}),
        "not used",
    ),
    "a norm that config.json leaves out": (lambda s, t: t.update({"input_norm.weight": torch.ones(96)}), "not used"),
    "a norm that is missing": (lambda s, t: s.update(norm_before_fc=True), r"lacks 1 tensor \(input_norm.weight\)"),
    "another shape": (
        lambda s, t: t.update({"norm.weight": torch.ones(31)}),
        r"norm.weight is \[31\]",
    ),
    "another width of features": (lambda s, t: s.update(target_hidden_size=20), r"fc.weight is \[32, 96\]"),
    "whole numbers": (
        lambda s, t: t.update({"norm.weight": torch.ones(32, dtype=torch.int8)}),
        r"norm.weight is \[32\] of torch.int8",
    ),
    "NaN": (lambda s, t: t["fc.weight"].view(-1)[7:8].fill_(torch.nan), r"NaN or infinity in 1 tensor \(fc.weight\)"),
    "a draft vocabulary of another size": (lambda s, t: s.update(draft_vocab_size=23), "draft_vocab_size is 23"),
    "no size of the draft vocabulary": (lambda s, t: s.pop("draft_vocab_size"), "draft_vocab_size is None"),
    "tokens beyond the target's": (lambda s, t: t["d2t"][-1:].fill_(VOCAB), "or others than the target's 61"),
    "tokens before the target's": (lambda s, t: t["d2t"][:1].fill_(-1), "or others than the target's 61"),
    "tokens twice": (lambda s, t: t["d2t"][1:2].copy_(t["d2t"][:1] - 1), "has tokens twice"),
    "maps that differ": (lambda s, t: t["t2d"].logical_not_(), "t2d and d2t are of different vocabularies"),
    "another vocabulary": (
        lambda s, t: (s["transformer_layer_config"].update(vocab_size=62), t.pop("t2d")),
        "is for a vocabulary of 62, and the target has 61",
    ),
    "tables of another width": (
        lambda s, t: t.update({"embed_tokens.weight": torch.ones(VOCAB, 30)}),
        r"embed_tokens.weight is \[61, 30\], and \[61, 32\] is needed",
    ),
    "a head of another size": (
        lambda s, t: t.update({"lm_head.weight": torch.ones(VOCAB, 32)}),
        r"lm_head.weight is \[61, 32\], and \[24, 32\] is needed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_with_a_reason(
    name: str, eagle_target: Path, rows: TargetRows, tmp_path: Path
) -> None:
    damage, words = REFUSED[name]
    settings = eagle_settings(eagle_target, 24)
    tensors = eagle_tensors(settings)
    write_eagle(tmp_path / "sound", settings, tensors)
    load_eagle(str(tmp_path / "sound"), rows)
    damage(settings, tensors)
    write_eagle(tmp_path / "damaged", settings, tensors)
    with pytest.raises(IncompatibleError, match=words) as caught:
        load_eagle(str(tmp_path / "damaged"), rows)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"kind": "semi-ar"}', "of the kind 'semi-ar', not 'eagle'"),
        ('{"kind": "eagle", "sigmas": {"0": []}}', "sigmas must be"),
        ('{"kind": "eagle", "sigmas": {"0": [0.0]}}', "sigmas must be"),
        ('{"kind": "eagle", "sigmas": [1]}', "drafter.json: "),
        ('{"kind": "eagle", "acceptance_by_rank": ["x"]}', "drafter.json: "),
        ('{"kind": "eagle", "reads_prompt": "no"}', "reads_prompt is 'no'"),
        ("[]", "drafter.json"),
    ],
)
def test_a_calibration_that_makes_no_sense_is_refused(content: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "drafter.json").write_text(content)
    with pytest.raises(IncompatibleError, match=words):
        load_eagle_calibration(str(tmp_path))


def test_weights_that_cannot_be_read_are_refused(eagle_target: Path, rows: TargetRows, tmp_path: Path) -> None:
    write_tiny_eagle(tmp_path, eagle_target)
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + bytes(7) + b"no JSON at all..")
    with pytest.raises(IncompatibleError, match="cannot be read"):
        load_eagle(str(tmp_path), rows)


def saved(model: Any, directory: Path, **options: Any) -> Any:
    model.save_pretrained(directory, **options)
    return model


TINY = {"num_hidden_layers": 2, "hidden_size": 16, "vocab_size": 50, "num_attention_heads": 2, "intermediate_size": 32}


def test_tables_are_found_in_checkpoints_of_other_families(tmp_path: Path) -> None:
    """Tied, of other names, and in several files."""
    tied = saved(LlamaForCausalLM(LlamaConfig(**TINY, tie_word_embeddings=True)), tmp_path / "tied")
    found = read_target_rows(str(tmp_path / "tied"))
    assert found.embedding is found.output
    assert torch.equal(found.embedding, tied.lm_head.weight.bfloat16())
    neox = saved(GPTNeoXForCausalLM(GPTNeoXConfig(**TINY)), tmp_path / "neox")
    found = read_target_rows(str(tmp_path / "neox"))
    assert torch.equal(found.embedding, neox.gpt_neox.embed_in.weight.bfloat16())
    assert torch.equal(found.output, neox.get_output_embeddings().weight.bfloat16())
    gpt2 = saved(GPT2LMHeadModel(GPT2Config(n_layer=3, n_embd=16, n_head=2, vocab_size=50)), tmp_path / "gpt2")
    found = read_target_rows(str(tmp_path / "gpt2"))
    assert torch.equal(found.output, gpt2.lm_head.weight.bfloat16())
    assert found.num_layers == 3
    sharded = saved(LlamaForCausalLM(LlamaConfig(**TINY)), tmp_path / "sharded", max_shard_size="4KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    found = read_target_rows(str(tmp_path / "sharded"))
    assert torch.equal(found.output, sharded.lm_head.weight.bfloat16())
    assert not torch.equal(found.output, found.embedding)


def test_only_the_tables_are_read(eagle_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from coppice.draft_models.eagle import target_rows

    read: list[str] = []
    original = target_rows._read
    monkeypatch.setattr(target_rows, "_read", lambda *a: (read.append(a[2]), original(*a))[1])
    read_target_rows(str(eagle_target))
    assert sorted(read) == ["lm_head.weight", "model.embed_tokens.weight"]


def without(directory: Path, target: Path, change: Callable[[Tensors], object], **config: Any) -> str:
    directory.mkdir()
    tensors = load_file(target / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    content = json.loads((target / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(content | config))
    return str(directory)


TABLE = "model.embed_tokens.weight"
BAD_TARGETS: dict[str, tuple[Callable[[Tensors], object], Settings, str]] = {
    "no embeddings": (lambda t: t.pop(TABLE), {}, "no tensors of an embedding table"),
    "two of them": (
        lambda t: t.update({"other.embed_tokens.weight": torch.ones(2, 2)}),
        {},
        "2 tensors",
    ),
    "whole numbers": (lambda t: t.update({TABLE: torch.ones(VOCAB, 32, dtype=torch.int8)}), {}, "no matrix of numbers"),
    "NaN": (lambda t: t[TABLE].view(-1)[:1].fill_(torch.nan), {}, "NaN or infinity"),
    "sizes that differ": (lambda t: t.update({TABLE: torch.ones(VOCAB, 30)}), {}, "and an output layer"),
    "no number of layers": (lambda t: None, {"num_hidden_layers": None}, "how many layers"),
}


@pytest.mark.parametrize("name", BAD_TARGETS)
def test_a_target_without_usable_tables_is_refused(name: str, eagle_target: Path, tmp_path: Path) -> None:
    change, config, words = BAD_TARGETS[name]
    with pytest.raises(IncompatibleError, match=words):
        read_target_rows(without(tmp_path / "target", eagle_target, change, **config))


def test_a_target_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IncompatibleError, match="there is no directory"):
        read_target_rows(str(tmp_path / "absent"))
    with pytest.raises(IncompatibleError, match="has no weights in safetensors"):
        read_target_rows(str(tmp_path))


@pytest.mark.parametrize(
    "scaling",
    [
        None,
        {"rope_type": "linear", "factor": 4.0},
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda scaling: scaling["rope_type"] if scaling else "default",
)
def test_rotary_factors_are_the_library_s_at_any_position(scaling: Settings | None) -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, max_position_embeddings=256, rope_scaling=scaling)
    rotary = LlamaRotaryEmbedding(config)
    positions = torch.tensor([0, 1, 77, 4095, 9000])
    own_cos, own_sin = RotaryTable(rotary).up_to(9000)
    cos, sin = rotary(torch.zeros(1, 1, 1), positions[None])
    torch.testing.assert_close(own_cos[positions], cos[0], atol=2e-3, rtol=0)
    signs = torch.cat([-torch.ones(8), torch.ones(8)])
    torch.testing.assert_close(own_sin[positions], sin[0] * signs, atol=2e-3, rtol=0)
