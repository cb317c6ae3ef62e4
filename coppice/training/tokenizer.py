"""The bundled tokenizer: byte-level BPE, trained on the training split."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from coppice.checkpoints.writing import whole_directory
from coppice.training.corpus import SourceFile

VOCAB_SIZE = 4096
EOS_TOKEN = "<|endoftext|>"
PAD_TOKEN = "<|pad|>"

# A line break and the indentation after it can be one token, all but the last space, which belongs to the
# next word; digits split one by one.
SPLIT_PATTERN = r"\n[\n ]*(?= )|\n+| +(?= )| ?[A-Za-z_]+| ?[^\sA-Za-z_0-9]+|[0-9]| +|\s+"


def train_tokenizer(files: Sequence[SourceFile], out: Path, vocab_size: int = VOCAB_SIZE) -> None:
    """Train on the files that are not held out and write a Hugging Face tokenizer to `out`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN, PAD_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    texts = (file.text for file in files if not file.is_held_out)
    tokenizer.train_from_iterator(texts, trainer)
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=EOS_TOKEN,
        pad_token=PAD_TOKEN,
        clean_up_tokenization_spaces=False,
    )
    with whole_directory(out) as whole:
        wrapped.save_pretrained(whole)
