"""Every family of the table with adapters and over ranks: the logits of merged weights."""

from __future__ import annotations

from pathlib import Path

import pytest
from checkpoints import checkpoint, new_model
from family_adapters import adapted_logits, plain_logits, save_family_adapter
from family_configs import FAMILY_CONFIGS, VARIANTS
from family_runs import family_folder
from rank_threads import World

from gptmanager.callbacks import load_peft_adapter
from gptmanager.errors import ConfigError
from gptmanager.kernels import Kernels
from gptmanager.models import load_model
from gptmanager.models.checkpoint_parts import read_config
from gptmanager.models.read_spec import read_spec
from gptmanager.models.splits import rank_spec
from gptmanager.ranks.layout import RankLayout

pytest.importorskip("transformers", reason="transformers is not installed")
EXACT = {"dtype": "float64"}


def test_layers_that_share_keys_and_values_stay_in_one_stage() -> None:
    config = {**VARIANTS["gemma4_text small"], "hidden_size_per_layer_input": 0}
    config["model_type"] = "gemma4_text"
    with pytest.raises(ConfigError, match="pipeline_parallel_size = 2: must be 1.* share keys"):
        rank_spec(read_spec(config), RankLayout(pipeline_parallel_size=2))


@pytest.mark.parametrize(("num_ranks", "num_kv_heads"), [(2, 4), (4, 2)])
def test_a_norm_over_all_heads_counts_each_head_once(num_ranks: int, num_kv_heads: int) -> None:
    config = {**FAMILY_CONFIGS["olmo2"], "num_hidden_layers": 1}
    config["num_key_value_heads"] = num_kv_heads
    given = checkpoint(new_model({"model_type": "olmo2", **config}))
    expected = plain_logits(load_model(given, kernels=Kernels(), **EXACT))

    def on_a_rank(collectives):
        options = {"collectives": collectives, **EXACT}
        return plain_logits(load_model(given, kernels=Kernels(), **options))

    found = World(num_ranks, 1).run(on_a_rank)[0]
    assert (found - expected).abs().max() < 1e-12 * expected.std()


@pytest.mark.parametrize("name", [*FAMILY_CONFIGS, *VARIANTS])
@pytest.mark.every(18)
def test_adapters_on_ranks_are_merged_weights_on_one(name: str, tmp_path: Path) -> None:
    folder = family_folder(name)
    merged = save_family_adapter(name, tmp_path)
    adapter = load_peft_adapter(tmp_path, model=folder)
    plain = load_model(folder, kernels=Kernels(), **EXACT)
    expected = [
        plain_logits(plain),
        plain_logits(load_model((read_config(folder), merged), kernels=Kernels(), **EXACT)),
    ]
    assert (expected[0] - expected[1]).abs().max() > 0.1 * expected[0].std()

    def logits(model):
        return [plain_logits(model), adapted_logits(model, *adapter)]

    def on_a_rank(collectives):
        return logits(load_model(folder, kernels=Kernels(), collectives=collectives, **EXACT))

    shares = any(layer.attention.kv_layer is not None for layer in plain.spec.layers)
    ways = [logits(plain)]
    if plain.spec.states:
        with pytest.raises(ConfigError, match="layers of this model keep a state"):
            rank_spec(plain.spec, RankLayout(tensor_parallel_size=2))
    else:
        ways.append(World(2, 1 if shares else 2).run(on_a_rank)[0])
    for found in ways:
        for own, right in zip(found, expected, strict=True):
            # merged weights are rounded to float32
            assert (own - right).abs().max() < 2e-5 * right.std()
