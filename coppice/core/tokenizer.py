"""The target's tokenizer without torch: text to ids, ids to text piece by piece, and a fingerprint."""

from __future__ import annotations

import hashlib
import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

# A multi-byte character can be spread over tokens; until it is complete, decoding shows this.
_INCOMPLETE = "\ufffd"


def load_tokenizer_json(model_dir: Path) -> bytes:
    """The `tokenizer.json` of a checkpoint directory.

    Raises:
        FileNotFoundError: the directory holds none.
    """
    return (model_dir / "tokenizer.json").read_bytes()


def fingerprint(tokenizer_json: bytes) -> str:
    """A hash of everything that decides which ids a text becomes and which text ids become.

    Special-token templates, padding and truncation are left out: they change no draft.

    Raises:
        ValueError: it is no JSON object.
    """
    content = json.loads(tokenizer_json)
    if not isinstance(content, dict):
        raise ValueError(f"tokenizer.json must be a JSON object, is a {type(content).__name__}")
    parts = {key: content.get(key) for key in ("model", "added_tokens", "normalizer", "pre_tokenizer", "decoder")}
    canonical = json.dumps(parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


class TargetTokenizer:
    """Encodes prompts and makes detokenizers."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self._tokenizer: Tokenizer = Tokenizer.from_buffer(tokenizer_json)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.fingerprint = fingerprint(tokenizer_json)

    @property
    def vocab_size(self) -> int:
        """Tokens that it knows, special ones included."""
        size: int = self._tokenizer.get_vocab_size()
        return size

    def encode(self, text: str, *, adds_special: bool = True) -> list[int]:
        """Token ids of a text, with the special tokens that the tokenizer itself adds, or as it is."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=adds_special).ids
        return ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of a single token, special or not."""
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return text

    def detokenizer(self, context: Sequence[int] = ()) -> Detokenizer:
        """A detokenizer for what follows `context`."""
        return Detokenizer(self, context)


class Detokenizer:
    """Turns a growing list of token ids into text, piece by piece.

    Text is held back while it ends in an incomplete character; one that the context ends in counts as not shown yet.
    The joined pieces equal the text of all tokens together after the context. Decoding works on a short window, so
    that the cost of a piece does not grow.
    """

    # Enough tokens of context for a decoder that looks at its neighbours (leading spaces, byte fallback).
    _WINDOW = 6
    # A character has at most four bytes, each perhaps a token: so many tokens at a cut may belong to a cut character.
    _MAX_CUT = 3

    def __init__(self, tokenizer: TargetTokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(context[-(self._WINDOW + 2 * self._MAX_CUT) :])
        start, self._shown = self._whole_characters()
        # Where decoding may begin: in the middle of a character, decoders spoil what follows. The first is in use.
        self._starts = deque([start, self._shown])

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens and return the text that is complete now."""
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
        """Whatever is still held back, incomplete characters included."""
        before, after = self._texts()
        self._shown = len(self._tokens)
        return after[len(before) :]

    def _texts(self) -> tuple[str, str]:
        start = self._starts[0]
        return self._decode(start, self._shown), self._decode(start, len(self._tokens))

    def _decode(self, start: int, end: int) -> str:
        return self._tokenizer.decode(self._tokens[start:end])

    def _whole_characters(self) -> tuple[int, int]:
        """Where a window begins, and how far the context is shown: no character is cut at either end."""
        count = len(self._tokens)
        for end in range(count, max(-1, count - self._MAX_CUT - 1), -1):
            latest = max(0, end - self._WINDOW)
            for start in range(latest, max(-1, latest - self._MAX_CUT - 1), -1):
                text = self._decode(start, end)
                if not (text.startswith(_INCOMPLETE) or text.endswith(_INCOMPLETE)):
                    return start, end
        return max(0, count - self._WINDOW), count
