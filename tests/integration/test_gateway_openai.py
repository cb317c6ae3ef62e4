"""The official `openai` package drives the gateway over services in this process, with the bundled models.

And parity: requests over HTTP give the tokens, log-probabilities, finish reasons and usage that they give over gRPC.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch

from coppice.checkpoints.bundled import MODELS
from coppice.client import Client, Options
from coppice.colocated.app import Colocated, load, running
from coppice.colocated.config import ColocatedConfig
from coppice.completion import Completion
from tests.fakes import eventually
from tests.http_client import gateway_to, post

openai = pytest.importorskip("openai", reason="the openai package is not installed")

# The first to use the models may have to compile their loops.
pytestmark = [pytest.mark.timeout(480), pytest.mark.asyncio(loop_scope="module")]

TEMPLATE = "{% if tools %}# tools: {{ tools | length }}\n{% endif %}" + (
    "{% for one in messages %}# {{ one.role }}: {{ one.content }}\n{% endfor %}def "
)
PROMPT = "import os\n\n\ndef count_lines(path):\n"
SAID = [{"role": "user", "content": "count the lines of a file"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "lines": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "lines"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Served:
    """Everything in this process, and clients of both APIs."""

    deployment: Colocated
    grpc: Client
    address: str
    openai: Any


def with_template(directory: Path) -> str:
    """The bundled target with a chat template."""
    for path in (MODELS / "target").iterdir():
        (directory / path.name).symlink_to(path)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return str(directory)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A deployment of the bundled models, a gateway to it, and clients."""
    torch.set_num_threads(1)
    env = {
        "VERIFIER_MODEL": with_template(tmp_path_factory.mktemp("target")),
        "DRAFTERS": f"small-lm={MODELS / 'small-lm'}",
        "DEVICE": "cpu",
        "KV_CACHE_MIB": "64",
        "THREADS": "1",
        "GRACE_S": "1",
    }
    config = ColocatedConfig.from_env(env)
    models = await asyncio.to_thread(load, config)
    async with (
        running(config, models, env={}) as deployment,
        Client(deployment.orchestrator.address) as grpc,
        gateway_to(deployment.orchestrator.address, served_model_name="code") as address,
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=60) as client,
    ):
        yield Served(deployment, grpc, address, client)


async def test_a_chat_and_its_usage(served: Served) -> None:
    answer = await served.openai.chat.completions.create(model="code", messages=SAID, max_tokens=12, seed=1)
    expected = await served.grpc.chat(SAID, Options(max_tokens=12, seed=1, temperature=1.0))
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", expected.text)
    assert choice.finish_reason == "length"
    assert answer.usage.prompt_tokens == expected.usage.prompt_tokens
    assert answer.usage.completion_tokens == 12
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 12
    assert choice.coppice["rounds"] > 0


async def test_a_stream_of_a_chat(served: Served) -> None:
    fields: dict[str, Any] = {"model": "code", "messages": SAID, "max_tokens": 40, "temperature": 0.8, "seed": 5}
    whole = await served.openai.chat.completions.create(**fields)
    stream = await served.openai.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len({chunk.id for chunk in chunks}) == 1


async def test_the_package_s_own_assembly_of_a_stream(served: Served) -> None:
    fields: dict[str, Any] = {"model": "code", "messages": SAID, "seed": 5, "logprobs": True}
    # The package takes no output that ends at a limit.
    fields["extra_body"] = {"guided_choice": ["def count(path)", "import os"]}
    async with served.openai.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        assembled = await stream.get_final_completion()
    whole = await served.openai.chat.completions.create(**fields)
    assert assembled.choices[0].message.content == whole.choices[0].message.content
    assert assembled.choices[0].logprobs.content == whole.choices[0].logprobs.content


async def test_an_output_that_keeps_a_schema(served: Served) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "file", "schema": SCHEMA, "strict": True}}
    answer = await served.openai.chat.completions.create(
        model="code", messages=SAID, max_tokens=80, seed=2, response_format=form
    )
    found = json.loads(answer.choices[0].message.content)
    assert found.keys() == {"name", "lines"}
    assert 0 <= found["lines"] <= 99
    assert answer.choices[0].finish_reason == "stop"


async def test_a_choice_of_texts_and_a_regular_expression(served: Served) -> None:
    fields: dict[str, Any] = {"model": "code", "prompt": PROMPT, "max_tokens": 20, "seed": 3}
    chosen = await served.openai.completions.create(**fields, extra_body={"guided_choice": ["yes (1)", "no."]})
    assert chosen.choices[0].text in ("yes (1)", "no.")
    matched = await served.openai.completions.create(**fields, extra_body={"guided_regex": "[a-c]{3}-[0-9]{2}"})
    assert len(matched.choices[0].text) == 6


TOOL: Any = {"type": "function", "function": {"name": "count", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "stop"}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "count"}}], ids=str)
async def test_a_call_of_a_tool(served: Served, choice: Any) -> None:
    # Enough for all white space that a grammar allows.
    fields: dict[str, Any] = {"model": "code", "messages": SAID, "tool_choice": choice, "max_tokens": 700}
    fields |= {"seed": 6, "temperature": 0.7}
    fields["tools"] = [TOOL] if choice == "required" else [TOOL, OTHER]
    whole = await served.openai.chat.completions.create(**fields)
    [call] = whole.choices[0].message.tool_calls
    assert (whole.choices[0].finish_reason, whole.choices[0].message.content) == ("tool_calls", None)
    arguments = json.loads(call.function.arguments)
    assert (call.type, call.function.name, arguments.keys()) == ("function", "count", {"name", "lines"})
    # The package puts the parts of a stream together.
    async with served.openai.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        assembled = await stream.get_final_completion()
    [streamed] = assembled.choices[0].message.tool_calls
    assert streamed.function.name == "count"
    assert json.loads(streamed.function.arguments) == arguments
    answer = {"role": "tool", "tool_call_id": call.id, "content": "12"}
    said = [*SAID, whole.choices[0].message, answer]
    after = await served.openai.chat.completions.create(model="code", messages=said, max_tokens=5)
    assert after.choices[0].message.content


async def test_log_probabilities(served: Served) -> None:
    answer = await served.openai.chat.completions.create(
        model="code", messages=SAID, max_tokens=6, temperature=0, logprobs=True, top_logprobs=3
    )
    expected = await served.grpc.chat(SAID, Options(max_tokens=6, top_log_probs=3))
    content = answer.choices[0].logprobs.content
    assert b"".join(bytes(one.bytes) for one in content).decode() == answer.choices[0].message.content
    assert [one.logprob for one in content] == [one.log_prob for one in expected.log_probs]
    # At temperature 0 the likeliest is drawn.
    assert all(one.top_logprobs[0].token == one.token and len(one.top_logprobs) == 3 for one in content)


async def test_several_outputs_and_stop_strings(served: Served) -> None:
    fields: dict[str, Any] = {"model": "code", "prompt": PROMPT, "max_tokens": 40, "temperature": 1.0, "seed": 11}
    answer = await served.openai.completions.create(**fields, n=3)
    texts = [choice.text for choice in answer.choices]
    assert len(set(texts)) == 3
    assert answer.usage.completion_tokens == sum(
        [choice.coppice["mean_acceptance_length"] * choice.coppice["rounds"] for choice in answer.choices]
    )
    stop = texts[0][5:8]
    stopped = await served.openai.completions.create(**fields, stop=stop)
    assert stopped.choices[0].text == texts[0].partition(stop)[0]
    assert (stopped.choices[0].finish_reason, stopped.choices[0].stop_reason) == ("stop", stop)


async def test_speculation_changes_no_token(served: Served) -> None:
    fields: dict[str, Any] = {"model": "code", "prompt": PROMPT, "max_tokens": 32, "seed": 4}
    off, on = [
        (await served.openai.completions.create(**fields, extra_body={"speculation": {"mode": mode}})).choices[0]
        for mode in ("off", "forced")
    ]
    assert on.text == off.text
    assert (off.coppice["draft_tokens"], on.coppice["draft_tokens"] > 0) == (0, True)


async def test_models_are_listed(served: Served) -> None:
    [model] = [model async for model in served.openai.models.list()]
    assert model.id == "code"
    assert (await served.openai.models.retrieve("code")).id == "code"


async def test_errors_are_the_package_s_own(served: Served) -> None:
    fields: dict[str, Any] = {"model": "code", "messages": SAID}
    with pytest.raises(openai.BadRequestError) as caught:
        await served.openai.chat.completions.create(**fields, temperature=-1)
    assert caught.value.param == "temperature"
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError, match="no such type") as caught:
        await served.openai.chat.completions.create(**fields, response_format=form)
    assert caught.value.param == "response_format"
    with pytest.raises(openai.NotFoundError):
        await served.openai.chat.completions.create(**{**fields, "model": "another"})
    with pytest.raises(openai.BadRequestError) as caught:
        await served.openai.chat.completions.create(**fields, extra_body={"no_such_field": 1})
    assert (caught.value.param, caught.value.code) == ("no_such_field", "unsupported_parameter")


async def test_a_stream_that_is_closed_ends_its_request(served: Served) -> None:
    stream = await served.openai.completions.create(model="code", prompt=PROMPT, max_tokens=400, stream=True)
    await anext(stream)
    await stream.close()
    closed_s = time.monotonic()
    service = served.deployment.orchestrator.service
    await eventually(lambda: service.num_requests == 0)
    assert time.monotonic() - closed_s < 1


PROMPTS = ["import os\n", PROMPT, "class Stack:\n    def", "x = [1, 2,", "# naïve café: "]
OPTIONS = [
    Options(temperature=0.0),
    Options(temperature=1.0),
    Options(temperature=0.7, top_p=0.9, min_p=0.02),
    Options(temperature=1.0, top_k=40, stop=("\n\n", "self"), min_tokens=3),
    Options(temperature=1.0, num_outputs=2),
    Options(temperature=1.0, ignore_eos=True, speculation="small-lm"),
]


def over_http(prompt: str, options: Options) -> dict[str, Any]:
    """The body that asks for the same."""
    names = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "ignore_eos")
    body = {name: value for name in names if (value := getattr(options, name)) is not None}
    forced = {"speculation": {"mode": "forced", "sources": [options.speculation]}}
    more = forced if options.speculation != "auto" else {}
    return {
        "model": "code", "prompt": prompt, "stop": list(options.stop), "n": options.num_outputs or 1,
        "logprobs": options.top_log_probs, "return_token_ids": True, **body, **more,
    }  # fmt: skip


def in_common(choice: dict[str, Any]) -> tuple[Any, ...]:
    log_probs = choice["logprobs"]
    return (
        choice["text"], choice["token_ids"], choice["finish_reason"], choice["stop_reason"], choice["coppice"]["seed"],
        log_probs["token_logprobs"], [sorted(top.values(), reverse=True) for top in log_probs["top_logprobs"]],
    )  # fmt: skip


def expected(completion: Completion) -> tuple[Any, ...]:
    reason = "length" if completion.finish_reason in ("length", "context_length") else "stop"
    stop_match = completion.stop_match if completion.finish_reason == "stop" else None
    return (
        completion.text, list(completion.token_ids), reason, stop_match, completion.seed,
        [one.log_prob for one in completion.log_probs], [list(one.top_log_probs) for one in completion.log_probs],
    )  # fmt: skip


async def test_sixty_requests_give_over_http_what_they_give_over_grpc(served: Served) -> None:
    cases = list(itertools.product(PROMPTS, OPTIONS, (1, 2)))
    assert len(cases) == 60
    for number, (prompt, options, top) in enumerate(cases):
        options = replace(options, max_tokens=16, seed=1000 + number, top_log_probs=top)
        body = over_http(prompt, options)
        by_http, by_grpc = await asyncio.gather(
            post(served.address, "/v1/completions", body), served.grpc.generate_all(prompt, options)
        )
        assert by_http.status == 200, by_http.body
        assert [in_common(choice) for choice in by_http.content["choices"]] == [expected(one) for one in by_grpc]
        usage = by_http.content["usage"]
        assert usage["prompt_tokens"] == by_grpc[0].usage.prompt_tokens
        assert usage["completion_tokens"] == sum(one.usage.completion_tokens for one in by_grpc)


CLIENTS = Path(__file__).parents[1] / "clients"
# `make clients` installs them, apart from our own environment.
INSTALLED = Path(sys.prefix) / "clients"


async def said_by(command: list[str], needed: Path) -> Any:
    """The JSON that a client's script prints."""
    if not needed.exists():  # noqa: ASYNC240  before anything runs
        pytest.skip(f"there is no {needed}: make clients")
    env = {**os.environ, "NODE_PATH": str(INSTALLED / "node_modules")}
    env.pop("PYTHONPATH", None)
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe, env=env)
    out, problems = await process.communicate()
    assert process.returncode == 0, problems.decode()
    return json.loads(out)


async def test_the_package_for_node_at_every_endpoint(served: Served) -> None:
    if shutil.which("node") is None:
        pytest.skip("there is no node")
    command = ["node", str(CLIENTS / "openai_node.cjs"), f"http://{served.address}/v1"]
    got = await said_by(command, INSTALLED / "node_modules" / "openai")
    chat: dict[str, Any] = {"model": "code", "messages": SAID, "max_tokens": 30, "temperature": 0.8, "seed": 5}
    expected = await served.openai.chat.completions.create(**chat)
    text = expected.choices[0].message.content
    assert got["chat"] == got["chat_stream"] == got["mode_off"] == text
    assert got["usage"]["completion_tokens"] == expected.usage.completion_tokens
    completion = await served.grpc.generate("import os\n", Options(max_tokens=30, temperature=0.8, seed=6))
    assert got["completion"] == got["completion_stream"] == completion.text
    assert (got["models"], got["model"]) == (["code"], "coppice")
    assert 0 <= got["schema"]["lines"] <= 99
    assert 0 <= got["call"]["lines"] <= 99
    assert got["log_probs"] == [2] * 30
    assert got["detokenized"] == "import os\n"
    assert got["refused"] == [[404, "model"], [400, "top_p"]]


@pytest.mark.parametrize("script", ["langchain_chat.py", "llama_index_chat.py"])
async def test_other_clients_stream(served: Served, script: str) -> None:
    python = INSTALLED / "bin" / "python"
    got = await said_by([str(python), str(CLIENTS / script), f"http://{served.address}/v1"], python)
    chat: dict[str, Any] = {"model": "code", "messages": SAID, "max_tokens": 60, "temperature": 0.8, "seed": 5}
    expected = await served.openai.chat.completions.create(**chat)
    assert "".join(got["texts"]) == expected.choices[0].message.content
    assert len(got["texts"]) > 2
    if "parts" in got:
        # Each is the object so far.
        assert len(got["parts"]) > 2
        last = got["parts"][-1]
        assert last.keys() == {"name", "lines"}
        assert all(last["name"].startswith(part["name"]) for part in got["parts"] if "name" in part)
