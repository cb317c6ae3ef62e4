"""What became of grammars is remembered in a bounded number of bytes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from coppice.core.errors import InvalidRequestError
from coppice.core.grammar import Grammar, GrammarKind
from tests.unit.verifier_svc.byte_tokenizer import byte_level_tokenizer
from verifier_svc.grammar.cache import GrammarCache
from verifier_svc.grammar.matcher import GrammarVocabulary


def regex(text: str) -> Grammar:
    return Grammar(GrammarKind.REGEX, text)


def test_compiled_ones_and_refusals_count_with_their_texts() -> None:
    vocabulary = GrammarVocabulary(byte_level_tokenizer([b"a"], ["<eos>"]), 2, [0])
    cache = GrammarCache(4 << 20)
    compiled = vocabulary.compile(regex("a+"))
    cache.put(regex("a+"), compiled)
    assert cache.num_bytes > compiled.num_bytes
    assert cache.find(regex("a+")) is compiled
    before = cache.num_bytes
    cache.put(regex("a+"), compiled)
    assert cache.num_bytes == before
    cache.put(regex("(" * 60_000), InvalidRequestError("x", "bad"))
    assert cache.num_bytes > before + 60_000
    for index in range(1000):
        cache.put(regex("(" * 60_000 + str(index)), InvalidRequestError("x", "bad"))
        assert cache.num_bytes <= 4 << 20
    assert cache.find(regex("a+")) is None


# Different schemas that take 2 MiB each, twice what the cache may hold.
_FLOOD = """
import json, sys
from concurrent.futures import Future
from pathlib import Path
from coppice.core.grammar import Grammar, GrammarKind
from verifier_svc.grammar.compiler import GrammarCompiler

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

compiler = GrammarCompiler(Path("models/target/tokenizer.json").read_bytes(), 4096, [0])
sizes = []
for index in range(60):
    schema = {"properties": {f"key_{index}_{number}": {"enum": [number, "x"]} for number in range(400)}}
    future = Future()
    compiler.begin(Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)), (), [0], future.set_result)
    future.result(60).allowed
    del future
    sizes.append(resident())
compiler.close()
print(max(sizes[45:]) - min(sizes[35:45]), max(sizes) - sizes[0], compiler.cache_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.timeout(120)
def test_memory_is_bounded_whatever_comes() -> None:
    done = subprocess.run([sys.executable, "-c", _FLOOD], capture_output=True, text=True, check=True)
    late_growth, growth, cache_bytes = map(int, done.stdout.split())
    assert cache_bytes <= 64 << 20
    assert growth < 160 << 20
    assert late_growth < 16 << 20
