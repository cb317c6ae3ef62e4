"""Heads that `coppice adapt` trains are served as they were trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from coppice.adapt.answer_store import TextRows
from coppice.adapt.eagle_checkpoint import save_head
from coppice.adapt.eagle_head import EagleHead, EagleShape
from coppice.adapt.eagle_measure import RANKS, TEMPERATURES, EagleReport
from coppice.draft_models.eagle.checkpoint import load_eagle
from coppice.draft_models.eagle.forward import CommittedRows, EagleRows, TorchEagle
from coppice.draft_models.eagle.target_rows import read_target_rows
from tests.unit.coppice.draft_models.eagle.conftest import VOCAB

PROMPT, COMMITTED, STEPS = 4, 7, 3
FACTS = (
    *("target", "fingerprint", "tokens", "steps", "loss", "minutes", "command", "curve", "recipe"),
    *("seed", "versions", "date"),
)


def test_a_head_has_the_logits_of_its_training_at_every_step(eagle_target: Path, tmp_path: Path) -> None:
    """After a prompt and committed tokens with the target's states, and after drafted ones with the head's own."""
    rows = read_target_rows(str(eagle_target))
    ids = np.sort(np.random.default_rng(0).choice(VOCAB, 24, replace=False))
    torch.manual_seed(1)
    shape = EagleShape.of(LlamaForCausalLM.from_pretrained(eagle_target))
    head = EagleHead(shape, rows.embedding.float(), rows.output.float()[ids])
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_((parameter + 0.1 * torch.randn_like(parameter)).bfloat16())
    report = EagleReport(
        {temperature: [[0.1] * RANKS] * STEPS for temperature in TEMPERATURES},
        {temperature: [0.5] * STEPS for temperature in TEMPERATURES},
        1,
    )
    save_head(head, ids, (2, 4, 5), report, tmp_path, facts=dict.fromkeys(FACTS, 1))
    weights = load_eagle(str(tmp_path), rows)
    assert weights.calibration.target == "1"
    assert weights.calibration.reads_prompt
    assert weights.calibration.sigmas[0] == (0.0, (0.5,) * STEPS)

    num_rows = PROMPT + COMMITTED + STEPS
    tokens, states = torch.randint(0, VOCAB, (1, num_rows)), torch.randn(1, num_rows, 96)
    places = torch.arange(num_rows)[None]
    text = TextRows(tokens, torch.zeros_like(tokens), places, states.unflatten(-1, (3, -1)))
    with torch.no_grad():
        trained = head(
            TextRows(*(part[:, PROMPT:] for part in text)), TextRows(*(part[:, :PROMPT] for part in text)), STEPS
        )
    forward = TorchEagle(weights, torch.device("cpu"))
    cache, vocabulary = forward.new_cache(), forward.vocabulary([])

    def rows(first: int, last: int) -> CommittedRows:
        return CommittedRows(*(part[0, first:last].numpy() for part in (tokens, states, places)))

    # The prompt's rows come after the first outcome.
    forward.read(cache, rows(PROMPT, PROMPT + 1))
    forward.see(cache, rows(0, PROMPT))
    forward.read(cache, rows(PROMPT + 1, PROMPT + COMMITTED))
    state = cache.state
    for step in range(STEPS):
        assert state is not None
        expected = (trained[step][0, COMMITTED - 1] @ head.output_rows.T).numpy()
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(forward.score(vocabulary, state[None])[0], expected, atol=1e-4)
        at = PROMPT + COMMITTED + step
        mask = np.zeros((1, at + 1), np.float32)
        [state] = forward.run(cache, at, EagleRows(tokens[0, at : at + 1].numpy(), state[None], np.array([at]), mask))
