"""Which numbers of a config.json are refused, and which unusual ones are not."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from coppice.checkpoints.config_numbers import refuse_absurd_numbers, refuse_more_layers
from coppice.core.errors import IncompatibleError


@pytest.mark.parametrize(
    "config",
    [
        {"time_step_limit": [0.0, math.inf]},
        {"rope_theta": 10**11, "rope_local_base_freq": 10**10, "total_tokens": 10**13},
        {"rope_theta": [10000.0, 5000000.0], "rope_parameters": None},
        {"pad_token_id": -1, "num_steps": -1, "layer_norm_eps": 0},
        {"use_cache": True, "architectures": ["LlamaForCausalLM"], "num_labels": 2},
    ],
)
def test_unusual_numbers_of_real_models_are_accepted(config: dict[str, Any]) -> None:
    refuse_absurd_numbers("model", config)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"text_config": {"layer_norm_epsilon": -1}}, "text_config.layer_norm_epsilon is -1"),
        ({"rope_scaling": {"factor": [1.0, math.nan]}}, "rope_scaling.factor is NaN"),
        ({"rope_parameters": {"full": {"rope_theta": -5.0}}}, "rope_parameters.full.rope_theta is -5"),
        ({"hidden_size": -(2**31)}, "hidden_size is beyond 2147483647"),
        ({"norm_eps": math.inf}, "norm_eps is inf"),
    ],
)
def test_absurd_numbers_are_refused_with_their_field(config: dict[str, Any], words: str) -> None:
    with pytest.raises(IncompatibleError, match=words):
        refuse_absurd_numbers("model", config)


def test_a_deep_configuration_is_read() -> None:
    depth = 500
    config = json.loads('{"a":' * depth + '{"hidden_size": 4294967296}' + "}" * depth)
    with pytest.raises(IncompatibleError, match="hidden_size is beyond"):
        refuse_absurd_numbers("model", config)


def test_as_many_layers_as_tensors_are_accepted() -> None:
    config = {"text_config": {"num_hidden_layers": 9}}
    refuse_more_layers("model", config, 9)
    with pytest.raises(IncompatibleError, match=r"text_config.num_hidden_layers is 9, and the weights have 8 tensors"):
        refuse_more_layers("model", config, 8)
