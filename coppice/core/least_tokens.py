"""Lower bound of the number of a text's tokens, far cheaper than encoding it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

METASPACE = "\u2581"
_NUM_BYTES = 256
# Steps that neither drop nor shorten text.
_WHOLE_NORMALIZERS = frozenset({"Prepend"})
_WHOLE_PRE_TOKENIZERS = frozenset({"ByteLevel", "Digits", "Metaspace", "Punctuation", "Split", "UnicodeScripts"})
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
# Above the rounding errors of a sum.
_ROUNDING = 1e-9


class LeastTokens:
    """Bound from the bytes of a text: each counts for the reciprocal of the longest token that has it.

    0 where a step of the tokenizer may drop or shorten text, or a byte may be part of an unknown token of any length.
    """

    def __init__(self, content: dict[str, Any], tokenizer: Tokenizer, byte_of: dict[str, bytes]) -> None:
        """`content` is that of tokenizer.json, `byte_of` the table of byte-level vocabularies."""
        self._shares: NDArray[np.float64] = np.zeros(_NUM_BYTES)
        if not _keeps_text(content):
            return
        pieces, known = _pieces(content["model"], _types(content.get("pre_tokenizer"), "pretokenizers"), byte_of)
        longest = np.zeros(_NUM_BYTES, dtype=np.int64)
        added = content.get("added_tokens") or ()
        for token in added:
            pieces.append(token["content"].encode())
            if tokenizer.normalizer is not None:
                pieces.append(tokenizer.normalizer.normalize_str(token["content"]).encode())
        sizes = np.array([len(piece) for piece in pieces], dtype=np.int64)
        np.maximum.at(longest, np.frombuffer(b"".join(pieces), dtype=np.uint8), np.repeat(sizes, sizes))
        # Spaces are written as this character, which texts may have, too.
        longest[ord(" ")] = max(longest[ord(" ")], *longest[list(METASPACE.encode())])
        if any(token.get("lstrip") or token.get("rstrip") for token in added):
            known[list(set(_SPACES.encode()))] = False
        np.divide(1.0, longest, out=self._shares, where=known & (longest > 0))

    def of(self, text: str) -> int:
        """Least number of tokens of a text."""
        counts = np.bincount(np.frombuffer(text.encode(), dtype=np.uint8), minlength=_NUM_BYTES)
        return int(float(counts @ self._shares) * (1 - _ROUNDING))


def _steps(step: Any, inner: str) -> list[dict[str, Any]]:
    """A step of tokenizer.json, or those that it is a sequence of."""
    if step is None:
        return []
    return [one for part in step[inner] for one in _steps(part, inner)] if step.get("type") == "Sequence" else [step]


def _types(step: Any, inner: str) -> set[str]:
    return {str(one.get("type")) for one in _steps(step, inner)}


def _keeps_text(content: dict[str, Any]) -> bool:
    """Whether all of a text reaches the model, no shorter than it was."""
    for step in _steps(content.get("normalizer"), "normalizers"):
        writes_spaces = step.get("type") == "Replace" and step.get("pattern") == {"String": " "}
        if step.get("type") not in _WHOLE_NORMALIZERS and not (writes_spaces and step.get("content") == METASPACE):
            return False
    for step in _steps(content.get("pre_tokenizer"), "pretokenizers"):
        if step.get("type") not in _WHOLE_PRE_TOKENIZERS or step.get("behavior") == "Removed":
            return False
        if step.get("type") == "Metaspace" and step.get("replacement") != METASPACE:
            return False
    return True


def _pieces(
    model: dict[str, Any], pre_tokenizers: set[str], byte_of: dict[str, bytes]
) -> tuple[list[bytes], NDArray[np.bool_]]:
    """Tokens of a vocabulary in bytes, and which bytes no unknown token has."""
    listed = model.get("vocab") or ()
    vocabulary = set(listed) if isinstance(listed, dict) else {str(piece) for piece, _ in listed}
    if "ByteLevel" in pre_tokenizers and model.get("type") == "BPE":
        table = {ord(character): byte[0] for character, byte in byte_of.items()}
        pieces = [piece.translate(table).encode("latin-1", "replace") for piece in vocabulary]
        known = {byte[0] for character, byte in byte_of.items() if character in vocabulary}
    else:
        pieces = [piece.encode() for piece in vocabulary]
        names = {f"<0x{byte:02X}>" for byte in range(_NUM_BYTES)}
        has_bytes = bool(model.get("byte_fallback")) and names <= vocabulary
        known = set(range(_NUM_BYTES)) if has_bytes else set()
        # Those of single bytes.
        pieces += [bytes([byte]) for byte in known]
    return pieces, np.isin(np.arange(_NUM_BYTES), list(known))
