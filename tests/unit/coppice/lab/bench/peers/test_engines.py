"""Other engines: found, asked and set up, without any of them."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from coppice.cli.child import ChildError
from coppice.core.errors import CoppiceError
from coppice.lab.bench.client import Task
from coppice.lab.bench.figures import mean_acceptance_length
from coppice.lab.bench.harness.experiment import BenchmarkError
from coppice.lab.bench.peers import llama_cpp, openvino, server
from coppice.lab.bench.peers.server import Engine, EngineServer, serving


@contextmanager
def answering(answer: dict[str, Any]) -> Iterator[tuple[str, list[tuple[str, Any]]]]:
    """Address of a server that gives every request this answer, and the requests it had."""
    asked: list[tuple[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.append((self.path, json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def test_llama_cpp_is_asked_for_the_whole_distribution_and_nothing_cached() -> None:
    timings = {"prompt_ms": 250.0, "predicted_ms": 750.0}
    with answering({"tokens": [5, 6, 7], "timings": timings}) as (address, requests):
        llama = EngineServer("llama.cpp-f32", "", address)
        [answer] = (await llama.complete([Task((1, 2), 3, 0.7, seed=9)])).answers
    assert answer.token_ids == (5, 6, 7)
    assert answer.ttft_s == pytest.approx(0.25)
    assert answer.completion is not None
    assert answer.completion.timing.forward_ms == 1000.0
    [(path, asked)] = requests
    assert path == "/completion"
    assert (asked["prompt"], asked["n_predict"], asked["seed"], asked["temperature"]) == ([1, 2], 3, 9, 0.7)
    # No top-k, top-p or min-p, which it has by default.
    assert asked["samplers"] == ["temperature"]
    assert asked["ignore_eos"]
    assert not asked["cache_prompt"]


async def test_an_answer_that_is_none_ends_the_benchmark() -> None:
    with pytest.raises(BenchmarkError, match=r"llama\.cpp-f32"):
        await EngineServer("llama.cpp-f32", "", "http://127.0.0.1:9").complete([Task((1,), 1, 0.0, seed=0)])


async def test_accepted_tokens_of_drafts_saved_passes_and_requests_at_once_share_a_clock() -> None:
    timings = {"prompt_ms": 1.0, "predicted_ms": 1.0, "draft_n_accepted": 4}
    with answering({"tokens": [5, 6, 7, 8, 9, 10], "timings": timings}) as (address, requests):
        llama = EngineServer("llama.cpp-bf16 ngram-simple", "", address)
        batch = await llama.complete([Task((number,), 6, 0.0, seed=0) for number in range(3)])
    assert mean_acceptance_length(batch.answers) == 3.0
    assert sorted(asked["prompt"] for _, asked in requests) == [[0], [1], [2]]
    # The server takes one at a time, and the last one's wait counts.
    assert batch.wall_s == pytest.approx(max(one.ended_s for one in batch.answers), abs=0.5)
    assert all(0 <= one.sent_s < one.ended_s for one in batch.answers)


def test_an_engine_is_in_our_environment_or_in_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert Engine("numpy", "numpy", "").interpreter() == sys.executable
    other = Engine("other", "no_such_engine", "")
    assert other.interpreter() is None
    (tmp_path / "peers" / "lib" / "python3.11" / "site-packages" / "no_such_engine").mkdir(parents=True)
    assert other.interpreter() == str(tmp_path / "peers" / "bin" / "python")


async def test_an_engine_that_is_not_installed_says_what_installs_it() -> None:
    with pytest.raises(BenchmarkError, match=r"no_such_engine is not installed \(make peers\)"):
        async with serving(Engine("other", "no_such_engine", "no.module"), "other", {}):
            raise AssertionError("it cannot start")


@pytest.mark.parametrize("fails", [False, True])
async def test_an_engine_has_a_process_that_says_where_it_serves_and_how(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = ["import json, sys, time", "options = json.loads(sys.argv[1])"]
    lines += ["sys.exit('it has no threads')"] if fails else ["print('ready http://here', options, flush=True)"]
    (tmp_path / "made_up_engine.py").write_text("\n".join([*lines, "time.sleep(60)"]))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH")))))
    engine = Engine("made-up", "json", "made_up_engine")
    with pytest.raises(ChildError, match="it has no threads") if fails else nullcontext():
        async with serving(engine, "made-up-f32", {"threads": 2}) as running:
            assert running == EngineServer("made-up-f32", "{'threads': 2}", "http://here")


def test_a_model_that_cannot_be_exported_is_named_without_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(directory: Path, out: Path, kind: str) -> None:
        raise CoppiceError(f"{directory} has a pre-tokenizer that is not exported")

    monkeypatch.setattr(server, "export_gguf", refuse)
    with pytest.raises(BenchmarkError) as raised:
        server.exported(tmp_path / "mine", tmp_path, "bf16")
    assert str(raised.value) == "mine cannot be given to llama.cpp: it has a pre-tokenizer that is not exported"


def test_llama_cpp_speculates_as_it_is_asked_to_and_says_with_what() -> None:
    types = SimpleNamespace(COMMON_SPECULATIVE_TYPE_NGRAM_SIMPLE=6, COMMON_SPECULATIVE_TYPE_DRAFT_SIMPLE=1)
    library = SimpleNamespace(common_speculative_type=types)
    parts = {"cpuparams": SimpleNamespace(), "cpuparams_batch": SimpleNamespace(), "mparams": SimpleNamespace()}
    asked = SimpleNamespace(
        types=[0], ngram_simple=SimpleNamespace(size_n=12, size_m=48), draft=SimpleNamespace(n_max=16, **parts)
    )
    assert llama_cpp.speculate(library, asked, {"threads": 2}) == ""
    assert asked.types == [0]
    note = llama_cpp.speculate(library, asked, {"threads": 2, "speculation": "ngram-simple"})
    assert note == ", ngram-simple, size_m=48, size_n=12"
    assert asked.types == [6]
    assert llama_cpp.speculate(library, asked, {"threads": 2, "draft": "small.gguf"}) == ", draft-simple, n_max=16"
    assert (asked.types, parts["mparams"].path, parts["cpuparams"].n_threads) == ([1], "small.gguf", 2)


def test_openvino_is_asked_for_the_whole_distribution_and_answers_in_the_words_of_llama_cpp(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, Any]] = []

    class LLMPipeline:
        def __init__(self, *arguments: str, **properties: Any) -> None:
            calls.append((arguments, properties))

        def generate(self, inputs: tuple[Any, Any], config: Any) -> Any:
            calls.append((inputs, config))
            metrics = SimpleNamespace(
                get_ttft=lambda: SimpleNamespace(mean=20.0),
                get_generate_duration=lambda: SimpleNamespace(mean=50.0),
                raw_metrics=SimpleNamespace(m_batch_sizes=[1, 2]),
            )
            return SimpleNamespace(perf_metrics=metrics, tokens=[[7, 8, 9]])

    genai = ModuleType("openvino_genai")
    genai.__dict__.update(
        LLMPipeline=LLMPipeline,
        GenerationConfig=SimpleNamespace,
        SchedulerConfig=SimpleNamespace,
        TokenizedInputs=lambda ids, mask: (ids, mask),
    )
    tensors = ModuleType("openvino")
    tensors.__dict__.update(Tensor=lambda array: array)
    for module in (genai, tensors):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(openvino.importlib.metadata, "version", lambda _: "1.0")

    pipeline = openvino.Pipeline({"model": "a.gguf", "threads": 3, "speculation": "prompt-lookup"})
    arguments, properties = calls[0]
    # By default it would know prompts that come again.
    assert not properties.pop("scheduler_config").enable_prefix_caching
    assert (arguments, properties) == (("a.gguf", "CPU"), {"INFERENCE_NUM_THREADS": 3, "prompt_lookup": True})
    assert "max_ngram_size=3" in pipeline.note
    answer = pipeline.complete({"prompt": [1, 2], "n_predict": 3, "temperature": 0.7, "seed": 5})
    assert answer["tokens"] == [7, 8, 9]
    assert answer["timings"] == {"prompt_ms": 20.0, "predicted_ms": 30.0, "draft_n_accepted": 1}
    (ids, _), config = calls[1]
    assert np.array_equal(ids, [[1, 2]])
    assert (config.max_new_tokens, config.ignore_eos, config.num_assistant_tokens) == (3, True, 5)
    assert (config.do_sample, config.temperature, config.rng_seed, config.top_p) == (True, 0.7, 5, 1.0)
