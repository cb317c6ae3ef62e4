"""Heads that `coppice adapt` trains are served as they were trained."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import LlamaForCausalLM

from coppice.adapt.eagle_checkpoint import save_head
from coppice.adapt.eagle_head import EagleHead, EagleShape
from coppice.adapt.eagle_measure import RANKS, TEMPERATURES, EagleReport
from drafter_svc.drafters.eagle.checkpoint import load_eagle
from drafter_svc.drafters.eagle.forward import CommittedRows, EagleRows, TorchEagle
from drafter_svc.drafters.eagle.target_rows import read_target_rows
from tests.unit.drafter_svc.drafters.eagle.conftest import VOCAB

COMMITTED, STEPS = 7, 3
FACTS = (
    *("target", "fingerprint", "tokens", "steps", "loss", "minutes", "command", "curve", "recipe"),
    *("seed", "versions", "date"),
)


def test_a_head_has_the_logits_of_its_training_at_every_step(eagle_target: Path, tmp_path: Path) -> None:
    """After committed tokens with the target's states, and after drafted ones with the head's own."""
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
    assert weights.calibration.sigmas[0] == (0.0, (0.5,) * STEPS)

    tokens, states = torch.randint(0, VOCAB, (1, COMMITTED + STEPS)), torch.randn(1, COMMITTED + STEPS, 96)
    places = torch.arange(COMMITTED + STEPS)[None]
    with torch.no_grad():
        trained = head(tokens, states, torch.zeros_like(tokens), places, STEPS)
    forward = TorchEagle(weights, torch.device("cpu"))
    cache, vocabulary = forward.new_cache(), forward.vocabulary([])
    committed = (part[0, :COMMITTED].numpy() for part in (tokens, states, places))
    forward.read(cache, CommittedRows(*committed))
    state = cache.state
    for step in range(STEPS):
        assert state is not None
        expected = (trained[step][0, COMMITTED - 1] @ head.output_rows.T).numpy()
        assert np.abs(expected).max() > 1
        np.testing.assert_allclose(forward.score(vocabulary, state[None])[0], expected, atol=1e-4)
        at = COMMITTED + step
        mask = np.zeros((1, at + 1), np.float32)
        [state] = forward.run(cache, at, EagleRows(tokens[0, at : at + 1].numpy(), state[None], np.array([at]), mask))
