"""Checkpoints that no service can use, each made from a whole tiny one: which, and how they are made."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafter_svc.model.layers_checkpoint import LAYERS_FILE, save_layers
from tests.eagle_checkpoints import write_tiny_eagle
from tests.tiny_blocks import BLOCK, block_calibration, write_tiny_block_drafter

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
NORM = "model.norm.weight"
HEAD = "lm_head.weight"
TABLE = "model.embed_tokens.weight"
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
# Of the tiny checkpoint.
VOCAB = 61

Change = Callable[[Path], None]


@dataclass(frozen=True)
class Case:
    """What is wrong with a checkpoint; `change` makes it so of a whole one, where there is one.

    Behind `words` the message is the library's, which differs between its versions.
    """

    what: str
    change: Change
    service: str = "verifier"
    kind: str = "small-lm"
    words: str = ""


def weights(change: Callable[[dict[str, Tensor]], Any], name: str = WEIGHTS) -> Change:
    """Change tensors by their names."""

    def apply(directory: Path) -> None:
        tensors = load_file(directory / name)
        change(tensors)
        save_file(tensors, directory / name, {"format": "pt"})

    return apply


def config(**changes: Any) -> Change:
    """Change entries of config.json; None takes one away."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))

    return apply


def file(name: str, content: str | bytes | None) -> Change:
    """Write a file, or take it away."""

    def apply(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        if content is not None:
            (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())

    return apply


def only(name: str, content: str | bytes) -> Change:
    """Nothing but one file."""

    def apply(directory: Path) -> None:
        shutil.rmtree(directory)
        directory.mkdir()
        file(name, content)(directory)

    return apply


def renamed(prefix: str) -> Change:
    """Put something before every tensor's name."""

    def rename(tensors: dict[str, Tensor]) -> None:
        for name in list(tensors):
            tensors[prefix + name] = tensors.pop(name)

    return weights(rename)


def without(*beginnings: str) -> Change:
    """Take tensors away."""

    def remove(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith(beginnings)]:
            del tensors[name]

    return weights(remove)


def spoilt(name: str, value: float, at: str = WEIGHTS) -> Change:
    """Put a number in the last place of a tensor."""
    return weights(lambda tensors: tensors[name].view(-1)[-1].fill_(value), at)


def cut(directory: Path) -> None:
    content = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(content[:20_000])


def as_a_file(directory: Path) -> None:
    shutil.rmtree(directory)
    # Version 3, one tensor, no keys.
    directory.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0))


def absent(directory: Path) -> None:
    shutil.rmtree(directory)


def sharded(directory: Path) -> None:
    """Two files, of which one is missing."""
    tensors = load_file(directory / WEIGHTS)
    names = sorted(tensors)
    places = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(names)}
    kept = {name: tensors[name] for name in names if places[name].startswith("model-00001")}
    (directory / WEIGHTS).unlink()
    save_file(kept, directory / "model-00001-of-00002.safetensors", {"format": "pt"})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def more_words(directory: Path) -> None:
    """A tokenizer of more tokens than the model has embeddings."""
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"] |= {f"word{number}": VOCAB + number for number in range(9)}
    path.write_text(json.dumps(content))


def no_tokenizer(directory: Path) -> None:
    for path in directory.glob("tokenizer*"):
        path.unlink()


def block_drafter(kind: str, change: Change | None = None) -> Change:
    """A block drafter in place of the target that it is made from."""

    def apply(directory: Path) -> None:
        target = directory.with_name(f"{directory.name}-target")
        shutil.move(directory, target)
        write_tiny_block_drafter(directory, target, kind)
        if change is not None:
            change(directory)

    return apply


def layers_alone(change: Change) -> Change:
    """A drafter with the embeddings of another checkpoint, which is whole."""

    def apply(directory: Path) -> None:
        from transformers import LlamaForCausalLM

        from drafter_svc.training.block_model import new_block_model

        base = directory.with_name(f"{directory.name}-base")
        shutil.move(directory, base)
        model = new_block_model(LlamaForCausalLM.from_pretrained(base), BLOCK - 1, extra_layers=0, seed=0)
        described = save_layers(model, BLOCK - 1, base, directory)
        calibration = {**block_calibration("semi-ar", BLOCK - 1), "base": described}
        (directory / "drafter.json").write_text(json.dumps(calibration))
        change(directory)

    return apply


def eagle_drafter(change: Change) -> Change:
    """An eagle drafter in place of its target."""

    def apply(directory: Path) -> None:
        target = directory.with_name(f"{directory.name}-target")
        shutil.move(directory, target)
        write_tiny_eagle(directory, target)
        change(directory)

    return apply


def layer_config(**changes: Any) -> Change:
    """Other settings of an eagle drafter's layer."""

    def apply(directory: Path) -> None:
        path = directory / "config.json"
        content = json.loads(path.read_text())
        content["transformer_layer_config"] |= changes
        path.write_text(json.dumps(content))

    return apply


def pipe(name: str) -> Change:
    """A pipe in a file's place, whose opening would wait forever."""

    def apply(directory: Path) -> None:
        (directory / name).unlink()
        os.mkfifo(directory / name)

    return apply


def endless(name: str) -> Change:
    """A link to a device in a file's place, whose reading would never end."""

    def apply(directory: Path) -> None:
        (directory / name).unlink(missing_ok=True)
        (directory / name).symlink_to("/dev/zero")

    return apply


def huge(name: str) -> Change:
    """A file of 1 TiB, which takes no place."""

    def apply(directory: Path) -> None:
        os.truncate(directory / name, 1 << 40)

    return apply


def rope(theta: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
EXL3 = {"quant_method": "exl3", "bits": 4}
LORA = {"base_model_name_or_path": "somebody/model", "peft_type": "LORA"}
CANNOT = "cannot be loaded: "
CANNOT_USE = "cannot be used: "

CASES = (
    Case("no such directory", absent),
    Case("a GGUF file that is cut short", as_a_file),
    Case("a directory with GGUF weights", only("model.gguf", b"GGUF")),
    Case("an empty directory", only("README.md", "")),
    Case("no config.json", file("config.json", None)),
    Case("config.json is empty", file("config.json", "")),
    Case("config.json is no JSON", file("config.json", '{"model_type": ')),
    Case("config.json is a list", file("config.json", "[]")),
    Case("config.json has no model_type", config(model_type=None)),
    Case("a model_type that the library does not know", config(model_type="planted"), words="which transformers "),
    Case("code of its own", config(model_type="planted", auto_map={"AutoModelForCausalLM": "planted.Planted"})),
    Case("config.json contradicts itself", config(num_attention_heads=3), words=CANNOT),
    Case("T5", config(model_type="t5", architectures=["T5ForConditionalGeneration"])),
    Case("BART", config(model_type="bart", architectures=["BartModel"], is_encoder_decoder=True)),
    Case("a masked language model", config(model_type="bert", architectures=["BertForMaskedLM"])),
    Case("a classifier", config(architectures=["LlamaForSequenceClassification"])),
    Case("an embedding model", config(architectures=["LlamaModel"])),
    Case("a vision model", config(model_type="vit", architectures=["ViTForImageClassification"])),
    Case("a PEFT adapter", only("adapter_config.json", json.dumps(LORA))),
    Case("an adapter beside the model", file("adapter_config.json", json.dumps(LORA))),
    Case("an adapter that was not merged", renamed("base_model.model.")),
    Case("GPTQ without its package", config(quantization_config=GPTQ), words="cannot be loaded here: "),
    Case("a quantisation that the library does not know", config(quantization_config=EXL3), words="loaded here: "),
    Case(
        "8-bit weights that config.json does not mention",
        weights(lambda tensors: tensors.update({OUTPUT: tensors[OUTPUT].to(torch.int8)})),
    ),
    Case("no weights", file(WEIGHTS, None)),
    Case(
        "weights as a pickle",
        lambda directory: (file(WEIGHTS, None)(directory), file("pytorch_model.bin", b"x")(directory))[0],
    ),
    Case("a file of weights that is empty", file(WEIGHTS, "")),
    Case("a file of weights that is cut short", cut),
    Case("a file of weights that is none", file(WEIGHTS, b"\x10" + bytes(7) + b"no JSON at all..")),
    Case("a shard that is missing", sharded),
    Case("an output layer that was not saved", without(HEAD)),
    Case("a layer that is missing", without("model.layers.1.")),
    Case("a tensor that is missing", without(NORM)),
    Case("names with a prefix", renamed("module.")),
    Case("tensors of another model", weights(lambda tensors: tensors.update({"model.gate.weight": torch.ones(3)}))),
    Case("more layers than config.json says", config(num_hidden_layers=1)),
    Case("another vocab_size in config.json", config(vocab_size=VOCAB + 3)),
    Case("a tensor of another shape", weights(lambda tensors: tensors.update({NORM: torch.ones(31)}))),
    Case("an output layer other than the embeddings it is tied to", config(tie_word_embeddings=True)),
    Case("NaN in a weight", spoilt(OUTPUT, float("nan"))),
    Case("infinity in a weight", spoilt(TABLE, float("-inf"))),
    Case("no tokenizer", no_tokenizer),
    Case("tokenizer.json is no JSON", file("tokenizer.json", '{"model": ')),
    Case("tokenizer.json is no tokenizer", file("tokenizer.json", "{}"), words=CANNOT),
    Case("the tokenizer of a larger model", more_words),
    Case("generation_config.json is empty", file("generation_config.json", "")),
    Case("config.json is a pipe", pipe("config.json")),
    Case("config.json is a device without end", endless("config.json")),
    Case("config.json of 1 TiB", huge("config.json")),
    Case("tokenizer.json is a pipe", pipe("tokenizer.json")),
    Case("tokenizer.json is a device without end", endless("tokenizer.json")),
    Case("a file of weights that is a pipe", pipe(WEIGHTS)),
    Case("more layers than tensors", config(num_hidden_layers=100_000)),
    Case("a size beyond 32 bits", config(intermediate_size=1 << 31)),
    Case("a size of thousands of digits", config(vocab_size=10**4000)),
    Case("more labels than any model has", config(num_labels=10**9)),
    Case("a norm's epsilon is NaN", config(rms_norm_eps=float("nan"))),
    Case("a norm's epsilon is negative", config(rms_norm_eps=-1e-5)),
    Case("rotary positions of base 0", config(**rope(0))),
    Case("rotary positions of base NaN", config(**rope(float("nan")))),
    Case("rotary positions of an infinite base", config(**rope(10**400))),
    Case("a negative number of positions", config(max_position_embeddings=-5)),
    Case("no such directory", absent, "drafter"),
    Case("drafter.json is a device without end", endless("drafter.json"), "drafter"),
    Case("drafter.json is nested too deeply", file("drafter.json", "[" * 500_000), "drafter", words="is not JSON: "),
    Case("a layer that is missing", without("model.layers.1."), "drafter"),
    Case("NaN in a weight", spoilt(OUTPUT, float("nan")), "drafter"),
    Case("T5", config(model_type="t5", architectures=["T5ForConditionalGeneration"]), "drafter"),
    Case("no drafter.json", block_drafter("semi-ar", file("drafter.json", None)), "drafter", "semi-ar"),
    Case("NaN in a weight", block_drafter("diffusion", spoilt(OUTPUT, float("nan"))), "drafter", "diffusion"),
    Case(
        "layers alone, one tensor missing",
        layers_alone(weights(lambda t: t.pop(NORM), LAYERS_FILE)),
        "drafter",
        "semi-ar",
    ),
    Case("layers alone, NaN in a weight", layers_alone(spoilt(NORM, float("nan"), LAYERS_FILE)), "drafter", "semi-ar"),
    Case("a matrix that is missing", eagle_drafter(weights(lambda t: t.pop("fc.weight"))), "drafter", "eagle"),
    Case("config.json is a pipe", eagle_drafter(pipe("config.json")), "drafter", "eagle"),
    Case("a file of weights that is a pipe", eagle_drafter(pipe(WEIGHTS)), "drafter", "eagle"),
    Case("a size beyond 32 bits", eagle_drafter(config(draft_vocab_size=10**12)), "drafter", "eagle"),
    Case(
        "a base of rotary positions that is a list",
        eagle_drafter(layer_config(rope_theta=[1])),
        "drafter",
        "eagle",
        CANNOT_USE,
    ),
    Case("rotary positions of base 0", eagle_drafter(layer_config(rope_theta=0)), "drafter", "eagle"),
    Case("a norm's epsilon is NaN", eagle_drafter(layer_config(rms_norm_eps=float("nan"))), "drafter", "eagle"),
    Case(
        "a norm's epsilon is no number", eagle_drafter(layer_config(rms_norm_eps="x")), "drafter", "eagle", CANNOT_USE
    ),
    Case("two layers", eagle_drafter(layer_config(num_hidden_layers=2)), "drafter", "eagle"),
)
