"""A byte-level tokenizer whose every token is known to the test, byte for byte."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers


def byte_level_tokenizer(tokens: Sequence[bytes], special: Sequence[str] = ()) -> bytes:
    """A tokenizer.json in which `special` have the first ids and `tokens` those that follow."""
    pieces = dict.fromkeys([*special, *(_as_characters(token) for token in tokens)])
    vocab = {piece: index for index, piece in enumerate(pieces)}
    assert len(vocab) == len(special) + len(tokens), "two tokens are the same"
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    serialised: str = tokenizer.to_str()
    return serialised.encode()


def _as_characters(token: bytes) -> str:
    """The characters that byte-level tokenizers write bytes as: printable ones as they are, others from 256 on."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [byte for byte in range(256) if byte not in shown]
    return "".join(chr(byte) if byte in shown else chr(256 + moved.index(byte)) for byte in token)
