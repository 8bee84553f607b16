"""Fields as published `config.json`s have them: read as transformers reads them, or refused."""

from __future__ import annotations

from typing import Any

import pytest
from family_configs import FAMILY_CONFIGS

from gptmanager.errors import ConfigError
from gptmanager.models.read_spec import read_spec

# Fields that change nothing, by family
WITHOUT_EFFECT: list[tuple[str, dict[str, Any]]] = [
    ("gemma", {"hidden_act": "gelu", "hidden_activation": None}),
    ("gemma", {"hidden_act": "gelu", "hidden_activation": "gelu_pytorch_tanh"}),
    ("gpt2", {"n_special": 0, "predict_special_tokens": True, "n_ctx": 1024}),
    ("gpt_neox", {"custom_pipelines": {"text-generation": {"impl": "own.Pipeline"}}}),
    ("gpt_oss", {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}),
    ("opt", {"learned_embeddings": True, "scale_embeddings": False}),
    ("starcoder2", {"activation_function": "gelu", "layer_norm_epsilon": 1e-5}),
]


@pytest.mark.parametrize(("name", "fields"), WITHOUT_EFFECT)
def test_a_published_field_changes_nothing(name: str, fields: dict[str, Any]) -> None:
    config = {**FAMILY_CONFIGS[name], "model_type": name}
    assert read_spec({**config, **fields}) == read_spec(config)


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma", "hidden_act", "silu"),
        ("gemma", "hidden_activation", "silu"),
        ("gpt_oss", "swiglu_alpha", 1.5),
    ],
)
def test_another_value_is_refused(name: str, field: str, value: Any) -> None:
    config = {**FAMILY_CONFIGS[name], "model_type": name, field: value}
    with pytest.raises(ConfigError, match=f"{field} = {value!r}: "):
        read_spec(config)
