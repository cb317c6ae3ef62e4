"""Text to ids and back: joined pieces equal the whole text, and the fingerprint tells tokenizers apart."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from coppice.checkpoints.bundled import MODELS
from coppice.core.tokenizer import TargetTokenizer, fingerprint, load_tokenizer_json


def byte_tokenizer_json(**changes: Any) -> bytes:
    """One token per byte: every character beyond ASCII is spread over several tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<|end|>": 0} | {letter: index for index, letter in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    content = json.loads(tokenizer.to_str())
    return json.dumps(content | changes).encode()


def fallback_tokenizer_json() -> bytes:
    """As Llama 2's: characters that have no token become one token per byte, decoded run by run."""
    vocabulary = {"<unk>": 0} | {f"<0x{byte:02X}>": byte + 1 for byte in range(256)}
    for piece in ["\u2581", *"abcdefghijklmnopqrstuvwxyz"]:
        vocabulary[piece] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer.to_str().encode()


def bundled_tokenizer_json() -> bytes:
    return load_tokenizer_json(MODELS / "target")


TOKENIZERS = {
    "bundled": TargetTokenizer(bundled_tokenizer_json()),
    "bytes": TargetTokenizer(byte_tokenizer_json()),
    "fallback": TargetTokenizer(fallback_tokenizer_json()),
}
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS.keys())
# Their decoders never change what earlier tokens gave, whatever follows.
each_byte_level_tokenizer = pytest.mark.parametrize("tokenizer", [TOKENIZERS["bundled"], TOKENIZERS["bytes"]])
# The replacement character itself cannot be told from a broken one; it is held back until something follows. Nor can
# the character that stands for a space be told from one.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd\u2581"), max_size=40)
SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=5)


def joined(tokenizer: TargetTokenizer, ids: list[int], sizes: list[int], context: list[int]) -> str:
    """Push `ids` in groups of the given sizes, repeated as needed, and join what comes out."""
    detokenizer = tokenizer.detokenizer(context)
    pieces = []
    start = turn = 0
    while start < len(ids):
        size = sizes[turn % len(sizes)]
        pieces.append(detokenizer.push(ids[start : start + size]))
        start, turn = start + size, turn + 1
    return "".join(pieces) + detokenizer.flush()


@each_tokenizer
@given(text=TEXT, sizes=SIZES)
def test_joined_pieces_equal_the_whole_text(tokenizer: TargetTokenizer, text: str, sizes: list[int]) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert joined(tokenizer, ids, sizes, context=[]) == text


@each_tokenizer
@given(text=TEXT, sizes=SIZES, share=st.floats(0, 1))
def test_pieces_go_on_where_a_context_was_cut_even_inside_a_character(
    tokenizer: TargetTokenizer, text: str, sizes: list[int], share: float
) -> None:
    ids = tokenizer.encode(text)
    cut = round(share * len(ids))
    whole = max(end for end in range(cut + 1) if not tokenizer.decode(ids[:end]).endswith("\ufffd"))
    shown = tokenizer.decode(ids[:whole])
    assert shown + joined(tokenizer, ids[cut:], sizes, context=ids[:cut]) == text


@each_byte_level_tokenizer
@given(data=st.data())
def test_joined_pieces_of_any_ids_equal_their_whole_decoding(tokenizer: TargetTokenizer, data: st.DataObject) -> None:
    # A model may emit any ids: broken characters and special tokens included.
    ids = data.draw(st.lists(st.integers(0, 256), max_size=40))
    sizes = data.draw(SIZES)
    assert joined(tokenizer, ids, sizes, context=[]) == tokenizer.decode(ids)


def test_an_incomplete_character_is_held_back_until_it_is_whole() -> None:
    tokenizer = TOKENIZERS["bytes"]
    detokenizer = tokenizer.detokenizer()
    assert [detokenizer.push([token]) for token in tokenizer.encode("a€b")] == ["a", "", "", "€", "b"]


def test_a_broken_character_at_the_end_is_shown_by_flush() -> None:
    tokenizer = TOKENIZERS["bytes"]
    detokenizer = tokenizer.detokenizer()
    assert detokenizer.push(tokenizer.encode("a€")[:2]) == ""
    assert detokenizer.flush() == "a\ufffd"


def test_special_tokens_are_text_only_when_asked_for() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.decode([0]) == ""
    assert tokenizer.token_text(0) == "<|end|>"


def test_the_fingerprint_ignores_what_changes_no_draft() -> None:
    plain = fingerprint(byte_tokenizer_json())
    assert fingerprint(byte_tokenizer_json(truncation=None, padding=None, post_processor=None)) == plain
    assert fingerprint(json.dumps(json.loads(byte_tokenizer_json()), indent=4).encode()) == plain


def test_the_fingerprint_tells_tokenizers_of_the_same_size_apart() -> None:
    model = json.loads(byte_tokenizer_json())["model"]
    swapped = dict(model["vocab"])
    swapped["a"], swapped["b"] = swapped["b"], swapped["a"]
    other = byte_tokenizer_json(model=model | {"vocab": swapped})
    assert fingerprint(other) != fingerprint(byte_tokenizer_json())


def test_a_directory_without_a_tokenizer_is_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json"):
        load_tokenizer_json(tmp_path)


@each_tokenizer
@given(text=TEXT)
def test_the_bytes_of_tokens_join_to_the_text(tokenizer: TargetTokenizer, text: str) -> None:
    ids = tokenizer.encode(text, adds_special=False)
    joined, decoded = b"".join(map(tokenizer.token_bytes, ids)), tokenizer.decode(ids).encode()
    # Some decoders take off the space that their normalizer puts in front.
    assert joined in (decoded, b" " + decoded)


def test_special_tokens_are_their_names_and_unknown_ids_are_nothing() -> None:
    tokenizer = TOKENIZERS["bytes"]
    assert tokenizer.token_bytes(0) == b"<|end|>"
    assert tokenizer.token_bytes(100_000) == b""


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer = TargetTokenizer(load_tokenizer_json(MODELS / "target"))
    tokenizer.encode("a")
    moments, ended = [time.perf_counter()], threading.Event()

    def tick() -> None:
        while not ended.wait(0.001):
            moments.append(time.perf_counter())

    ticking = threading.Thread(target=tick)
    ticking.start()
    began = time.perf_counter()
    ids = tokenizer.encode("a" * 500_000)
    took = time.perf_counter() - began
    ended.set()
    ticking.join()
    assert len(ids) > 1000
    assert sum(began < moment < began + 0.9 * took for moment in moments) > 5


REPEATED = st.lists(st.tuples(st.text(max_size=20), st.integers(1, 50)), max_size=4).map(
    lambda parts: "".join(text * number for text, number in parts)
)


@each_tokenizer
@given(text=REPEATED)
def test_a_text_has_at_least_as_many_tokens_as_its_bytes_need(tokenizer: TargetTokenizer, text: str) -> None:
    assert tokenizer.least_tokens(text) <= len(tokenizer.encode(text, adds_special=False))


def test_the_bound_is_that_of_the_longest_token_of_each_byte() -> None:
    assert TOKENIZERS["bytes"].least_tokens("caf\u00e9" * 1000) == 4999
    assert TOKENIZERS["fallback"].least_tokens("ab" * 1000) == 1999
    text = "def add(a, b):\n    return a + b\n" * 1000
    most = len(TOKENIZERS["bundled"].encode(text))
    assert most / 10 < TOKENIZERS["bundled"].least_tokens(text) <= most


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFC"}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}},
        {"pre_tokenizer": None},
    ],
)
def test_there_is_no_bound_where_text_may_vanish(changes: dict[str, Any]) -> None:
    assert TargetTokenizer(byte_tokenizer_json(**changes)).least_tokens("a" * 100_000) == 0


def test_added_tokens_may_take_spaces_with_them() -> None:
    added = json.loads(byte_tokenizer_json())["added_tokens"]
    stripping = TargetTokenizer(byte_tokenizer_json(added_tokens=[{**added[0], "lstrip": True}]))
    text = " " * 1000 + "<|end|>"
    assert stripping.encode(text) == [0]
    assert stripping.least_tokens(text) <= 1
    # Seven bytes are one token, in which other letters are.
    assert TOKENIZERS["bytes"].least_tokens("<|end|>" * 700) <= 700


def test_special_tokens_may_be_text_where_they_are_named() -> None:
    content = json.loads(byte_tokenizer_json())["added_tokens"]
    mark = {**content[0], "id": 257, "content": "[TOOL_CALLS]"}
    tokenizer = TargetTokenizer(byte_tokenizer_json(added_tokens=[*content, mark]))
    ids = tokenizer.encode("é[TOOL_CALLS]é<|end|>[TOOL_CALLS]a")
    assert ids.count(257) == 2
    for shown, expected in ((("[TOOL_CALLS]", "[ARGS]"), "é[TOOL_CALLS]é[TOOL_CALLS]a"), ((), "ééa")):
        for sizes in (1, 2, len(ids)):
            detokenizer = tokenizer.detokenizer((), shown)
            found = [detokenizer.push(ids[at : at + sizes]) for at in range(0, len(ids), sizes)]
            assert "".join(found) + detokenizer.flush() == expected
