"""The whole system, separate processes, real checkpoints: speculation changes no token.

The bundled pair always runs, one topology for all tests: prompts that look at the cache have salts of their own. Two
foreign checkpoints run, too, where COPPICE_FOREIGN_MODELS names a folder that holds them, or where they lie beside the
checkout.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from coppice.checkpoints.bundled import MODELS
from coppice.cli.child import Child, ChildError
from coppice.cli.topology import DrafterSpec, Topology, TopologySpec, running
from coppice.client import Client, Options, RequestFailedError
from coppice.core.sampling import output_seed

REPO = Path(__file__).resolve().parents[2]
FOREIGN = Path(os.environ.get("COPPICE_FOREIGN_MODELS", REPO.parent / "shared" / "data" / "models"))
CODE_PROMPTS = (
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import os\n\n\ndef count_lines(path):\n",
    "def parse_header(line):\n    name, _, value = line.partition(':')\n",
)
STORY_PROMPTS = ("Once upon a time, there was a little", "Tom and Sue went to the park and", "The dog")
START_S = 90.0
STOP_S = 10.0
SAMPLING = {
    "greedy": Options(temperature=0.0),
    "T=0.7 top_p": Options(temperature=0.7, top_p=0.9, seed=11),
    "T=1": Options(temperature=1.0, seed=12),
    "T=1 top_k": Options(temperature=1.0, top_k=40, seed=13),
}


@dataclass(frozen=True)
class Pair:
    """A target, its drafter, and prompts that they can continue."""

    target: Path
    drafter: Path
    prompts: tuple[str, ...]


BUNDLED = Pair(MODELS / "target", MODELS / "small-lm", CODE_PROMPTS)
FOREIGN_PAIRS = {
    "foreign": Pair(FOREIGN / "stories260K", FOREIGN / "llama2xs-279K", STORY_PROMPTS),
    "foreign, swapped": Pair(FOREIGN / "llama2xs-279K", FOREIGN / "stories260K", STORY_PROMPTS),
}


@contextlib.asynccontextmanager
async def client_of(pair: Pair) -> AsyncIterator[Client]:
    """A client of a topology that serves a foreign pair."""
    spec = TopologySpec(
        target=str(pair.target),
        drafters=(DrafterSpec("small-lm", str(pair.drafter)),),
        device="cpu",
        threads=1,
        env={"DTYPE": "float32"},
    )
    async with running(spec) as topology, Client(topology.address) as client:
        yield client


@functools.cache
def loaded_by_transformers(target: Path) -> tuple[PreTrainedTokenizerBase, PreTrainedModel]:
    """A target as the oracles have it: in float32, going on behind its end token."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return AutoTokenizer.from_pretrained(target), model


def greedy_by_transformers(pair: Pair, prompt: str, count: int) -> list[int]:
    """The oracle: transformers' own greedy generation."""
    tokenizer, model = loaded_by_transformers(pair.target)
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    rows = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    continuation: list[int] = rows[0, ids.shape[1] :].tolist()
    return continuation


@pytest.mark.timeout(240)
async def test_tokens_are_those_of_the_target_alone(bundled: Client) -> None:
    await check_tokens(bundled, BUNDLED)


@pytest.mark.timeout(240)
@pytest.mark.parametrize("name", FOREIGN_PAIRS)
async def test_tokens_are_those_of_a_foreign_target_alone(name: str) -> None:
    pair = FOREIGN_PAIRS[name]
    if not pair.target.is_dir():
        pytest.skip(f"the foreign checkpoints are not at {FOREIGN}")
    async with client_of(pair) as client:
        await check_tokens(client, pair)


async def check_tokens(client: Client, pair: Pair) -> None:
    torch.set_num_threads(1)
    count = 64
    accepted = 0
    for prompt in pair.prompts:
        for label, sampling in SAMPLING.items():
            options = replace(sampling, max_tokens=count, ignore_eos=True)
            # Whether or not it pays here.
            on = await client.generate(prompt, replace(options, speculation="small-lm"))
            off = await client.generate(prompt, replace(options, speculation="off"))
            assert on.token_ids == off.token_ids, (label, prompt)
            assert on.text == off.text
            assert off.speculation.draft_tokens == 0
            accepted += on.speculation.accepted_tokens
            if label == "greedy":
                assert list(off.token_ids) == greedy_by_transformers(pair, prompt, count)
    assert accepted > 100


@pytest.mark.timeout(120)
async def test_traversal_verification_goes_through_the_whole_system(bundled: Client) -> None:
    """At temperature 0 the target's own tokens; above, accepted drafts, and nothing that top-k rules out."""
    options = Options(max_tokens=48, ignore_eos=True, acceptance="traversal", top_log_probs=5)
    greedy = await bundled.generate(CODE_PROMPTS[0], options)
    assert list(greedy.token_ids) == greedy_by_transformers(BUNDLED, CODE_PROMPTS[0], 48)
    outputs = await bundled.generate_all(
        CODE_PROMPTS[1], replace(options, temperature=1.0, top_k=5, seed=4, num_outputs=2)
    )
    assert len({output.token_ids for output in outputs}) == 2
    for output in outputs:
        assert output.speculation.accepted_tokens > 8
        for token, found in zip(output.token_ids, output.log_probs, strict=True):
            assert token in found.top_token_ids


@pytest.mark.timeout(120)
async def test_log_probabilities_are_those_of_the_target_alone(bundled: Client) -> None:
    prompt = CODE_PROMPTS[1]
    for temperature in (0.0, 1.0):
        options = Options(temperature=temperature, seed=8, max_tokens=48, ignore_eos=True, top_log_probs=4)
        # Forced: on a busy machine the planner may well do without drafts.
        on = await bundled.generate(prompt, replace(options, speculation="small-lm"))
        off = await bundled.generate(prompt, replace(options, speculation="off"))
        assert on.speculation.accepted_tokens > 0
        # The same bits.
        assert on.log_probs == off.log_probs
        reference = log_softmax_by_transformers(prompt, on.token_ids)
        assert len(on.log_probs) == len(reference) == 48
        for one, token, row in zip(on.log_probs, on.token_ids, reference, strict=True):
            assert one.log_prob == pytest.approx(float(row[token]), abs=1e-4)
            assert one.top_log_probs == pytest.approx(row.topk(4).values.tolist(), abs=1e-4)
            assert one.top_log_probs == pytest.approx(row[list(one.top_token_ids)].tolist(), abs=1e-4)


@torch.inference_mode()
def log_softmax_by_transformers(prompt: str, token_ids: Sequence[int]) -> torch.Tensor:
    """The oracle: log-probabilities [tokens, vocab] at every generated token's place, by one plain forward."""
    tokenizer, model = loaded_by_transformers(MODELS / "target")
    ids = [*tokenizer(prompt)["input_ids"], *token_ids]
    rows: torch.Tensor = model(input_ids=torch.tensor([ids])).logits[0, -len(token_ids) - 1 : -1]
    return rows.double().log_softmax(-1)


@pytest.mark.timeout(120)
async def test_each_of_several_outputs_is_that_of_a_request_with_its_seed(bundled: Client) -> None:
    prompt = "\n\n".join(CODE_PROMPTS * 3)
    options = Options(temperature=1.0, seed=9, max_tokens=32, ignore_eos=True, top_log_probs=1, cache_salt="a")
    outputs = await bundled.generate_all(prompt, replace(options, num_outputs=3))
    assert [output.seed for output in outputs] == [output_seed(9, index) for index in range(3)]
    for output in outputs:
        alone = await bundled.generate(prompt, replace(options, seed=output.seed, speculation="off", cache_salt="b"))
        assert (output.token_ids, output.text, output.log_probs) == (alone.token_ids, alone.text, alone.log_probs)
    assert len({output.token_ids for output in outputs}) == 3
    # The prompt is computed once: the others use its full blocks.
    blocks = (outputs[0].usage.prompt_tokens - 1) // 64 * 64
    assert blocks > 0
    assert [output.usage.cached_prompt_tokens for output in outputs] == [0, blocks, blocks]


@pytest.mark.timeout(120)
async def test_an_interrupted_stream_goes_on_where_it_was(bundled: Client) -> None:
    options = Options(temperature=1.0, seed=5, max_tokens=40, ignore_eos=True)
    whole = await bundled.generate(CODE_PROMPTS[0], options)
    for cut in (1, 17, 39):
        rest = await bundled.generate(CODE_PROMPTS[0], replace(options, resume_token_ids=tuple(whole.token_ids[:cut])))
        assert list(rest.token_ids) == list(whole.token_ids[cut:])


@pytest.mark.timeout(120)
async def test_a_prompt_that_was_read_before_gives_the_same_tokens_without_being_read(bundled: Client) -> None:
    prompt = "\n\n".join(CODE_PROMPTS * 3)
    options = Options(temperature=1.0, seed=6, max_tokens=40, ignore_eos=True, cache_salt="c")
    first = await bundled.generate(prompt, options)
    again = await bundled.generate(prompt, replace(options, speculation="off"))
    apart = await bundled.generate(prompt, replace(options, cache_salt="d"))
    assert first.token_ids == again.token_ids == apart.token_ids
    assert first.usage.cached_prompt_tokens == apart.usage.cached_prompt_tokens == 0
    assert again.usage.cached_prompt_tokens == (first.usage.prompt_tokens - 1) // 64 * 64 > 64


@pytest.mark.timeout(120)
async def test_stop_strings_end_the_text_in_the_same_place_with_and_without_speculation(bundled: Client) -> None:
    options = Options(max_tokens=60, ignore_eos=True)
    whole = await bundled.generate(CODE_PROMPTS[0], options)
    stop = whole.text[len(whole.text) // 2 :][:3]
    for speculation in ("auto", "off"):
        stopped = await bundled.generate(CODE_PROMPTS[0], replace(options, stop=(stop,), speculation=speculation))
        assert stopped.text == whole.text[: whole.text.index(stop)]
        assert stopped.finish_reason == "stop"


@pytest.mark.timeout(120)
async def test_bad_requests_fail_at_the_door_and_the_next_one_is_served(bundled: Client) -> None:
    for prompt, options in (
        ("", Options()),
        ([4_000_000], Options()),
        ([5] * 5000, Options()),
        ("x", Options(temperature=-1.0)),
    ):
        with pytest.raises(RequestFailedError) as failure:
            await bundled.generate(prompt, options)
        assert failure.value.code.name == "INVALID_ARGUMENT"
    completion = await bundled.generate(CODE_PROMPTS[0], Options(max_tokens=4))
    assert completion.usage.completion_tokens <= 4


@pytest.mark.timeout(120)
async def test_a_drafter_with_another_tokenizer_of_the_same_size_is_refused(topology: Topology, tmp_path: Path) -> None:
    """The bundled drafter with two tokens swapped in its tokenizer: same size, different words."""
    import json
    import shutil

    shutil.copytree(MODELS / "small-lm", tmp_path / "twisted")
    file = tmp_path / "twisted" / "tokenizer.json"
    content = json.loads(file.read_text())
    vocab = content["model"]["vocab"]
    first, second = [token for token, index in vocab.items() if index in (1000, 1001)]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    file.write_text(json.dumps(content))
    [verifier] = [child for child in topology._children if child.name == "verifier"]
    env = {"LISTEN_ADDRESS": "127.0.0.1:0", "DEVICE": "cpu", "THREADS": "1", "MODEL": str(tmp_path / "twisted")}
    drafter = Child("drafter", "drafter_svc", env, None)
    await drafter.start()
    try:
        addresses = {"VERIFIER_ADDRESS": verifier.address, "DRAFTER_ADDRESSES": await drafter.ready(START_S)}
        orchestrator = Child("orchestrator", "orchestrator", {**addresses, "REQUIRE_DRAFTERS": "true"}, None)
        await orchestrator.start()
        with pytest.raises(ChildError, match="tokenizer"):
            await orchestrator.ready(START_S)
    finally:
        await drafter.stop(STOP_S)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_what_comes_again_is_drafted_from_memory_and_says_the_same(bundled: Client, temperature: float) -> None:
    """Without and with the small LM; remembered only from requests of the same salt."""
    prompt = "class Cache:\n    def __init__(self, size):\n"
    options = Options(temperature=temperature, seed=21, max_tokens=64, ignore_eos=True)
    off = await bundled.generate(prompt, replace(options, speculation="off"))
    for speculation in ("cache", "auto"):
        salted = replace(options, speculation=speculation, cache_salt=f"{speculation} {temperature}")
        rounds = []
        for _ in range(8):
            completion = await bundled.generate(prompt, salted)
            assert completion.token_ids == off.token_ids
            rounds.append(completion.speculation.rounds)
            if len(rounds) > 2 and (speculation == "auto" or rounds[-1] < rounds[0] / 2):
                break
            # Outputs are written together with others that end at about the same time.
            await asyncio.sleep(0.3)
        if speculation == "cache":
            assert completion.speculation.sources["cache"].accepted == completion.speculation.accepted_tokens
            assert rounds[-1] < rounds[0] / 2
