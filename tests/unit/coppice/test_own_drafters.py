"""`coppice adapt`: text of a target's own, an EAGLE-3 head trained on it, and its checkpoint."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from coppice.adapt.answer_store import NUM_READ, AnswerStore, TextRows, Window, read_texts, shards, write_shard
from coppice.adapt.eagle_checkpoint import read_head
from coppice.adapt.eagle_head import EagleHead, EagleShape, distillation, new_head
from coppice.adapt.eagle_run import EagleLoss, EagleRecipe
from coppice.adapt.own_text import GivenPrompt, TextShape, WrittenText
from coppice.adapt.run import AdaptPlan, run_plan
from coppice.cli.errors import WRONG, explained
from coppice.core.errors import IncompatibleError
from coppice.core.tokenizer import TargetTokenizer, load_tokenizer_json
from coppice.draft_models.eagle.checkpoint import load_eagle
from coppice.draft_models.eagle.target_rows import read_target_rows
from tests.tiny_checkpoint import tiny_llama, write_tiny_llama

VOCAB = 60
FULL = Path("/dev/full")
SHAPE = EagleShape(hidden=16, intermediate=24, heads=4, kv_heads=2, head_size=4, epsilon=1e-5, rope_theta=10_000.0)
RECIPE = EagleRecipe(epochs=2, draft_vocab=24, rows=2, length=16, test_steps=3)


def random_head(seed: int = 0) -> EagleHead:
    torch.manual_seed(seed)
    head = EagleHead(SHAPE, torch.randn(VOCAB, 16), torch.randn(24, 16))
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


def random_window() -> Window:
    """Answer 0 is cut off, after a prompt of two rows; answer 1 has three, and answer 2 none."""
    generator = torch.Generator().manual_seed(1)

    def rows(segments: list[list[int]], places: list[list[int]], num_states: int) -> TextRows:
        shape = len(segments), len(segments[0])
        tokens = torch.randint(VOCAB, shape, generator=generator)
        states = torch.randn(*shape, num_states, 16, generator=generator).bfloat16()
        return TextRows(tokens, torch.tensor(segments), torch.tensor(places), states)

    answers = rows([[0] * 4 + [1] * 5, [2] * 9], [[3, 4, 5, 6, 3, 4, 5, 6, 7], list(range(9))], 4)
    before = rows([[0, 0, 0, 1, 1, 1], [-1] * 6], [[0, 1, 2, 0, 1, 2], [0] * 6], 3)
    return Window(answers, before)


def drafted_row_by_row(head: EagleHead, window: Window, batch: int, row: int, steps: int) -> list[Tensor]:
    """What a drafter computes after the token at `row`: true rows of its text up to it, then its own."""
    layer = head.layers[0]
    keys: list[Tensor] = []
    values: list[Tensor] = []

    def read(token: int, residual: Tensor, place: int) -> Tensor:
        inputs = torch.cat([layer.input_layernorm(head.embeddings[token]), layer.hidden_norm(residual)])

        def turned(part: Tensor) -> Tensor:
            angles = place * 10_000.0 ** (-torch.arange(0, 4, 2) / 4)
            low, high = part[..., :2], part[..., 2:]
            return torch.cat([low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()], -1)

        query = turned(layer.self_attn.q_proj(inputs).view(4, 4))
        keys.append(turned(layer.self_attn.k_proj(inputs).view(2, 4)))
        values.append(layer.self_attn.v_proj(inputs).view(2, 4))
        seen = []
        for number in range(4):
            scores = torch.stack([query[number] @ key[number // 2] / 2 for key in keys]).softmax(0)
            seen.append(sum(score * value[number // 2] for score, value in zip(scores, values, strict=True)))
        residual = residual + layer.self_attn.o_proj(torch.cat(seen))
        return residual + layer.mlp(layer.post_attention_layernorm(residual))

    number = int(window.answers.segments[batch, row])
    for part, last in ((window.before, len(window.before.segments[batch])), (window.answers, row + 1)):
        tokens, segments, places, states = (column[batch, :last] for column in part)
        for at in (segments == number).nonzero().flatten():
            residual = read(int(tokens[at]), head.fc(head.input_norm(states[at, :3].flatten())), int(places[at]))
    results = [head.norm(residual)]
    tokens, place = window.answers.token_ids[batch], int(window.answers.places[batch, row])
    for step in range(1, steps):
        residual = read(int(tokens[row + step]), residual, place + step)
        results.append(head.norm(residual))
    return results


@pytest.mark.parametrize(("batch", "row"), [(0, 1), (0, 6), (1, 4)])
@torch.no_grad()
def test_a_row_of_the_training_sees_what_a_drafter_sees(batch: int, row: int) -> None:
    head, window = random_head(), random_window()
    results = head(*window, 3)
    expected = drafted_row_by_row(head, window, batch, row, 3)
    for found, one in zip(results, expected, strict=True):
        torch.testing.assert_close(found[batch, row], one, atol=1e-4, rtol=1e-4)


def test_the_gradient_is_that_of_the_loss() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(7, 16, generator=generator, requires_grad=True)
    output_rows = torch.randn(24, 16, generator=generator)
    targets = torch.randn(7, 24, generator=generator).softmax(-1)
    weights = torch.tensor([1.0, 0, 1, 1, 0, 1, 1])
    loss = distillation(rows, targets, output_rows, weights, 0.7)
    (gradient,) = torch.autograd.grad(loss, rows)
    own = (rows @ output_rows.T).log_softmax(-1)
    divergence = F.kl_div(own, targets, reduction="none").sum(-1)
    distance = 0.5 * (own.exp() - targets).abs().sum(-1)
    plain = ((divergence + 0.7 * distance) * weights).sum() / weights.sum()
    torch.testing.assert_close(loss, plain, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradient, torch.autograd.grad(plain, rows)[0], atol=1e-5, rtol=1e-4)


def text_of(number: int, prompt: tuple[int, ...], answer: tuple[int, ...]) -> WrittenText:
    """A text whose states are token + 100 x state, one number each."""

    def states(token_ids: tuple[int, ...]) -> bytes:
        return np.add.outer(np.array(token_ids), 100 * np.arange(4)).astype(np.int16).tobytes()

    return WrittenText(number, prompt, answer, 0.0, states(answer), states(prompt[1:]))


def test_held_out_answers_are_never_trained_on(tmp_path: Path) -> None:
    write_shard([text_of(50, (1, 2), (3, 4)), text_of(51, (5,), (6, 7, 8))], 1, tmp_path / "text-0")
    assert [text.answer for text in read_texts(shards(tmp_path)[0])] == [(3, 4), (6, 7, 8)]
    trained, held_out = (AnswerStore.open(tmp_path, held_out=which) for which in (False, True))
    assert trained.token_ids.tolist() == [6, 7, 8]
    assert held_out.token_ids.tolist() == [3, 4]


def test_a_window_sees_prompts_and_what_was_cut_off(tmp_path: Path) -> None:
    texts = [text_of(1, (1, 2, 3), (4, 5, 6)), text_of(100, (30, 31), (32,)), text_of(2, (7,), (8,))]
    write_shard([*texts, text_of(3, (9, 10), (11, 12))], 1, tmp_path / "text-0")
    answers, before = AnswerStore.open(tmp_path, held_out=False).windows([1, 3], 3)
    assert answers.token_ids.tolist() == [[5, 6, 8], [8, 11, 12]]
    assert answers.segments.tolist() == [[0, 0, 1], [1, 2, 2]]
    assert answers.places.tolist() == [[3, 4, 0], [0, 1, 2]]
    assert before.token_ids.tolist() == [[2, 3, 4], [10, 0, 0]]
    assert before.segments.tolist() == [[0, 0, 0], [2, -1, -1]]
    assert before.places.tolist() == [[0, 1, 2], [0, 0, 0]]
    for rows, count in ((answers, 4), (before, NUM_READ)):
        is_real = rows.segments >= 0
        states = rows.states.view(torch.int16)[is_real].squeeze(-1)
        assert torch.equal(states, rows.token_ids[is_real][:, None] + 100 * torch.arange(count))


def test_of_a_long_prompt_the_rows_that_a_drafter_gets_are_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coppice.adapt.answer_store.MOST_PROMPT_FEATURES", 2)
    text = text_of(1, (1, 2, 3, 4), (5, 6))
    write_shard([replace(text, prompt_features=text.prompt_features[8:])], 1, tmp_path / "text-0")
    answers, before = AnswerStore.open(tmp_path, held_out=False).windows([0], 2)
    assert before.token_ids.tolist() == [[3, 4]]
    assert before.states.view(torch.int16)[0, :, 0, 0].tolist() == [3, 4]
    assert (before.places.tolist(), answers.places.tolist()) == ([[0, 1]], [[2, 3]])


@pytest.mark.parametrize("part", ["features", "prompt_features"])
def test_texts_with_fewer_states_than_tokens_are_refused(part: str, tmp_path: Path) -> None:
    text = text_of(1, (1, 2, 3), (4, 5))
    with pytest.raises(IncompatibleError, match="fewer states than tokens"):
        write_shard([replace(text, **{part: getattr(text, part)[8:]})], 1, tmp_path / "text-0")


def test_windows_of_a_pass_do_not_overlap(tmp_path: Path) -> None:
    write_shard([text_of(1, (0,), tuple(range(100)))], 1, tmp_path / "text-0")
    store = AnswerStore.open(tmp_path, held_out=False)
    batches = [store.batch(0, step, 2, 8).answers.token_ids for step in range(5)]
    seen = torch.cat(batches).flatten().tolist()
    assert len(set(seen)) == len(seen) == 80
    assert torch.equal(store.batch(0, 3, 2, 8).answers.token_ids, batches[3])
    assert not torch.equal(store.batch(0, 5, 2, 8).answers.token_ids, batches[0])


def test_a_head_is_made_and_serves(tmp_path: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "eagle"
    write_tiny_llama(target, vocab_size=VOCAB, max_context_tokens=256, num_hidden_layers=4)
    plan = AdaptPlan(str(target), 1500, 0, RECIPE, TextShape(answer_tokens=60, at_once=4))
    run_plan(plan, out, use_compiler=False)
    weights = load_eagle(str(out), read_target_rows(str(target)))
    assert weights.feature_layers == (2, 2, 2)
    assert len(weights.draft_ids) == 24
    record = json.loads((out / "recipe.json").read_text())
    curve = record["curve"]
    assert record["tokens"] >= 1300
    # What a head says before it is trained.
    store = AnswerStore.open(tmp_path / "eagle.state" / "text", held_out=True)
    model = tiny_llama(vocab_size=VOCAB, max_context_tokens=256, num_hidden_layers=4)
    untrained = new_head(model, weights.draft_ids, torch.ones(3))
    window = store.windows([0], 16)
    with torch.no_grad():
        before = float(EagleLoss(RECIPE, model.model.norm, untrained.output_rows)(untrained, window))
    assert curve[-1]["held_out"] < before
    # The same command has nothing left to do, and another one may not go on from its work.
    run_plan(plan, out, use_compiler=False)
    assert json.loads((out / "recipe.json").read_text())["curve"] == curve
    with pytest.raises(IncompatibleError, match="other settings"):
        run_plan(AdaptPlan(str(target), 1500, 1, RECIPE, plan.shape), out, use_compiler=False)
    # More answers, and training goes on with the head.
    taught = load_file(out / "model.safetensors")["fc.weight"]
    idle = replace(RECIPE, epochs=0.01, learning_rate=0.0)
    run_plan(replace(plan, tokens=3000, recipe=idle), out, use_compiler=False)
    assert torch.equal(load_file(out / "model.safetensors")["fc.weight"], taught)
    assert json.loads((out / "recipe.json").read_text())["tokens"] > record["tokens"]
    # The target has changed meanwhile.
    write_tiny_llama(target, vocab_size=VOCAB, max_context_tokens=256, num_hidden_layers=4, seed=1)
    with pytest.raises(IncompatibleError, match="of a target with weights"):
        run_plan(plan, out, use_compiler=False)


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("suffix", [".npy", ".prompts.npy", ".npz"])
def test_a_shard_that_a_full_disk_has_cut_short_is_none(suffix: str, tmp_path: Path) -> None:
    write_shard([text_of(1, (1,), (2, 3))], 1, tmp_path / "text-0")
    texts = [text_of(2, (4,), (5, 6)), text_of(50, (7,), (8,))]
    full = tmp_path / f"text-1{suffix}.tmp"
    full.symlink_to(FULL)
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_shard(texts, 1, tmp_path / "text-1")
    line = f"there is no space for {tmp_path}/text-1{suffix}: free some, or choose another directory"
    assert explained(caught.value) == (WRONG, line)
    assert shards(tmp_path) == [tmp_path / "text-0"]
    assert AnswerStore.open(tmp_path, held_out=False).token_ids.tolist() == [2, 3]
    # With room, the same shard is written over what was left.
    full.unlink(missing_ok=True)
    write_shard(texts, 1, tmp_path / "text-1")
    assert AnswerStore.open(tmp_path, held_out=False).token_ids.tolist() == [2, 3, 5, 6]
    assert AnswerStore.open(tmp_path, held_out=True).token_ids.tolist() == [8]


def test_given_prompts_are_answered_again_and_again(tmp_path: Path) -> None:
    target, out = tmp_path / "target", tmp_path / "eagle"
    write_tiny_llama(target, vocab_size=VOCAB, max_context_tokens=128, num_hidden_layers=4)
    tokenizer = TargetTokenizer(load_tokenizer_json(target))
    texts = ("ab", "cde", "f" * 500)
    prompts = tuple(GivenPrompt(text, is_turn=number == 1) for number, text in enumerate(texts))
    idle = replace(RECIPE, epochs=0.01)
    plan = AdaptPlan(str(target), 1000, 0, idle, TextShape(answer_tokens=60, at_once=4), prompts)
    run_plan(plan, out, use_compiler=False)
    written = [text for shard in shards(tmp_path / "eagle.state" / "text") for text in read_texts(shard)]
    assert len(written) > len(prompts)
    for text in written:
        encoded = tuple(tokenizer.encode(texts[text.number % 3], adds_special=False))
        # An answer has its room.
        assert text.prompt == encoded[-68:]
        assert text.number < 3 or text.temperature > 0
    assert json.loads((out / "recipe.json").read_text())["prompts"] == plan.made_from["prompts"]
    with pytest.raises(IncompatibleError, match="made from"):
        run_plan(replace(plan, prompts=prompts[:2]), out, use_compiler=False)


def test_a_foreign_head_is_not_trained_further(tmp_path: Path) -> None:
    (tmp_path / "drafter.json").write_text('{"target": "a"}')
    with pytest.raises(IncompatibleError, match="holds no whole EAGLE-3 head"):
        read_head(tmp_path, "a")
    save_file({"fc.weight": torch.ones(2, dtype=torch.bfloat16), "d2t": torch.ones(2)}, tmp_path / "model.safetensors")
    with pytest.raises(IncompatibleError, match="target with weights a, and this one has b"):
        read_head(tmp_path, "b")
    assert {name: value.dtype for name, value in read_head(tmp_path, "a").items()} == {"fc.weight": torch.float32}


def test_another_family_is_refused() -> None:
    config = GPTNeoXConfig(vocab_size=VOCAB, hidden_size=16, num_hidden_layers=3, num_attention_heads=2)
    with pytest.raises(IncompatibleError, match="GPTNeoXForCausalLM is not of the Llama family"):
        new_head(GPTNeoXForCausalLM(config), torch.arange(4), torch.ones(3))
