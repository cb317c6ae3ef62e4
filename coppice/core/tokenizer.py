"""The target's tokenizer without torch: encoding, incremental decoding, fingerprint."""

from __future__ import annotations

import hashlib
import json
import re
from collections import deque
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from coppice.core.least_tokens import METASPACE, LeastTokens

# Decoded form of an incomplete multi-byte character.
_INCOMPLETE = "\ufffd"
# Pieces of single bytes in SentencePiece vocabularies.
_BYTE_PIECE = re.compile("<0x([0-9A-F]{2})>")


def _byte_characters() -> dict[str, bytes]:
    """Bytes by the characters that byte-level vocabularies write for them (table of GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): bytes([byte]) for byte in shown} | {
        chr(256 + index): bytes([byte]) for index, byte in enumerate(hidden)
    }


_BYTE_OF = _byte_characters()


def _decoder_types(decoder: Any) -> frozenset[str]:
    """Types of a decoder of tokenizer.json and of those it is a sequence of."""
    if not isinstance(decoder, dict):
        return frozenset()
    inner = [_decoder_types(one) for one in decoder.get("decoders") or ()]
    return frozenset({str(decoder.get("type"))}).union(*inner)


def load_tokenizer_json(model_dir: Path) -> bytes:
    """`tokenizer.json` of a checkpoint directory.

    Raises:
        FileNotFoundError: the file is missing.
    """
    return (model_dir / "tokenizer.json").read_bytes()


def fingerprint(tokenizer_json: bytes) -> str:
    """Hash of everything that maps texts to ids and ids to texts.

    Special-token templates, padding and truncation are excluded: they do not affect drafts.

    Raises:
        ValueError: the bytes are not a JSON object.
    """
    return _fingerprint(json.loads(tokenizer_json))


def _fingerprint(content: Any) -> str:
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer.json must be a JSON object, is a {type(content).__name__}")
    parts = {key: content.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")}
    canonical = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class TargetTokenizer:
    """Encodes prompts and creates detokenizers."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        # Parsed once: a large vocabulary takes tens of MiB.
        content = json.loads(tokenizer_json)
        self.fingerprint = _fingerprint(content)
        self._decoders = _decoder_types(content.get("decoder"))
        added = content.get("added_tokens") or ()
        self._added: dict[int, bytes] = {token["id"]: token["content"].encode() for token in added}
        self._special = {token["content"]: token["id"] for token in added if token.get("special")}
        self._token_bytes: dict[int, bytes] = {}
        self._least = LeastTokens(content, self._tokenizer, _BYTE_OF)

    @property
    def vocab_size(self) -> int:
        """Size of the vocabulary, special tokens included."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Token ids of a text, with or without the special tokens that the tokenizer adds.

        Other threads run meanwhile: the library's encoding of a batch releases the interpreter lock, and that of a
        single text does not.
        """
        (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Lower bound of the number of a text's tokens; takes about 2 ms for a million characters."""
        return self._least.of(text)

    def decode(self, token_ids: Sequence[int], *, skips_special: bool = True) -> str:
        """Text of token ids, without special tokens or with their names."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skips_special)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of a single token, special or not."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes that a token adds to a text, whole characters or not; of an added token, its name. Empty: none."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._bytes_of(token_id)
        return found

    def _bytes_of(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        piece: str | None = self._tokenizer.id_to_token(token_id)
        if piece is None:
            return b""
        if "ByteLevel" in self._decoders:
            return b"".join(_BYTE_OF[character] if character in _BYTE_OF else character.encode() for character in piece)
        if "ByteFallback" in self._decoders and (match := _BYTE_PIECE.fullmatch(piece)):
            return bytes.fromhex(match[1])
        if self._decoders & {"Metaspace", "Replace"}:
            return piece.replace(METASPACE, " ").encode()
        return self.token_text(token_id).encode()

    def detokenizer(self, context: Sequence[int] = (), shown: Collection[str] = ()) -> Detokenizer:
        """Detokenizer for tokens after `context`; of special tokens, those named in `shown` are text."""
        special = self._special.items()
        shows = any(name in shown for name, _ in special)
        hidden = frozenset(token for name, token in special if name not in shown) if shows else None
        return Detokenizer(self, context, hidden)


class Detokenizer:
    """Decodes a growing list of token ids in pieces.

    Text that ends in an incomplete character is held back; one at the end of the context counts as not shown yet. The
    joined pieces equal the decoded text of all tokens after the context. Decoding uses a short window, so a piece has
    constant cost.
    """

    # Context for decoders that look at neighbours (leading spaces, byte fallback).
    _WINDOW = 6
    # A character has at most four bytes, each possibly a token: a cut may split off this many tokens.
    _MAX_CUT = 3

    def __init__(
        self, tokenizer: TargetTokenizer, context: Sequence[int], hidden: frozenset[int] | None = None
    ) -> None:
        """`hidden` are the tokens that are not text; None: all special ones."""
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._tokens = list(context[-(self._WINDOW + 2 * self._MAX_CUT) :])
        start, self._shown = self._whole_characters()
        # Possible starts of the window, at character boundaries; the first is in use.
        self._starts = deque([start, self._shown])

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is complete now."""
        self._tokens.extend(token_ids)
        before, after = self._texts()
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._shown = len(self._tokens)
        self._starts.append(self._shown)
        while self._starts[1] <= self._shown - self._WINDOW:
            self._starts.popleft()
        return after[len(before) :]

    def flush(self) -> str:
        """Text still held back, incomplete characters included."""
        before, after = self._texts()
        self._shown = len(self._tokens)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        start = self._starts[0]
        return self._decode(start, self._shown), self._decode(start, len(self._tokens))

    def _decode(self, start: int, end: int) -> str:
        tokens = self._tokens[start:end]
        if self._hidden is None:
            return self._tokenizer.decode(tokens)
        return self._tokenizer.decode([one for one in tokens if one not in self._hidden], skips_special=False)

    def _whole_characters(self) -> tuple[int, int]:
        """Start of the window and end of the shown context, both at character boundaries."""
        count = len(self._tokens)
        for end in range(count, max(-1, count - self._MAX_CUT - 1), -1):
            latest = max(0, end - self._WINDOW)
            for start in range(latest, max(-1, latest - self._MAX_CUT - 1), -1):
                text = self._decode(start, end)
                if not (text.startswith(_INCOMPLETE) or text.endswith(_INCOMPLETE)):
                    return start, end
        return max(0, count - self._WINDOW), count
