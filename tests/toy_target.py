"""A deterministic toy target, and what samples from it as a verifier does, without a model.

Token i below 256 is the byte i; EOS is the one token above.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from coppice.core.log_probs import TokenLogProbs
from coppice.core.tokenizer import fingerprint
from coppice.core.tree import ROOT, TokenTree

EOS = 256
VOCAB = 257
CONTEXT = 400
MODEL = "toy"

# (tokens so far, seed) -> next token
Target = Callable[[Sequence[int], int], int]


def byte_characters() -> list[str]:
    """The character that byte-level tokenizers write for each byte (GPT-2's table)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return [chr(byte) if byte in shown else chr(256 + hidden.index(byte)) for byte in range(256)]


def toy_tokenizer_json(eos_text: str = "<eos>") -> bytes:
    """A byte-level tokenizer without merges."""
    vocab = {character: byte for byte, character in enumerate(byte_characters())}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([eos_text])
    content: str = tokenizer.to_str()
    return content.encode()


TOKENIZER_JSON = toy_tokenizer_json()
FINGERPRINT = fingerprint(TOKENIZER_JSON)


def babble(tokens: Sequence[int], seed: int) -> int:
    """A lower-case letter or a space that depends on position, seed and the last three tokens."""
    mixed = seed * 31 + len(tokens) * 7
    for token in tokens[-3:]:
        mixed = (mixed * 1_000_003 + token * 97 + 11) & 0xFFFFFFFF
    return b"abcdefghijklmnopqrstuvwxyz "[(mixed >> 7) % 27]


def script(text: str, prompt_length: int) -> Target:
    """A target that says `text` after a prompt of a known length, then EOS."""
    said = text.encode()

    def target(tokens: Sequence[int], seed: int) -> int:
        index = len(tokens) - prompt_length
        return said[index] if index < len(said) else EOS

    return target


def plain(target: Target, prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What plain decoding says: the oracle."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(target(tokens, seed))
        if tokens[-1] == EOS:
            break
    return tokens[len(prompt) :]


def follow(target: Target, tokens: Sequence[int], seed: int, tree: TokenTree) -> tuple[list[int], list[int]]:
    """Sample and follow: the committed tokens and the accepted nodes."""
    committed: list[int] = []
    accepted: list[int] = []
    node = ROOT
    while True:
        token = target([*tokens, *committed], seed)
        committed.append(token)
        child = tree.children.get((node, token))
        if child is None:
            return committed, accepted
        accepted.append(child)
        node = child


def toy_log_probs(position: int, token: int, num_top: int) -> TokenLogProbs:
    """Numbers that name the token and its place; exact in single precision."""
    top = tuple((token + rank) % VOCAB for rank in range(num_top))
    return TokenLogProbs(-position - token / 512, top, tuple(-position - rank / 32 for rank in range(num_top)))
