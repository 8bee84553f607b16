"""Every family of the table against transformers: logits, tokens, defaults of configs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import (
    PagedDriver,
    checkpoint,
    default_config,
    expected_logits,
    is_greedy,
    new_model,
)
from family_configs import BASE, FAMILY_CONFIGS, VARIANTS
from family_runs import (
    LONG,
    SHORT,
    all_logits,
    divergence,
    exact_logits,
    exact_model,
    expected,
    family_folder,
    family_model,
    tokens,
)
from odd_configs import family_config
from renamed_families import RENAMED
from stateful_runs import run_many

from gptmanager import GptManager, InferenceRequest, KvCacheConfig, ModelType, OptionalParams
from gptmanager.callbacks import generate
from gptmanager.errors import ConfigError
from gptmanager.kernels.experts.routing import choose_experts
from gptmanager.memory.places import runs
from gptmanager.models import load_model
from gptmanager.models.families import FAMILIES
from gptmanager.models.families.places import place_tensors
from gptmanager.models.families.wrappers import TEXT_FAMILIES
from gptmanager.models.parameters import parameter_shapes
from gptmanager.models.read_spec import read_spec
from gptmanager.models.recurrent.kind import RecurrentKind
from gptmanager.models.spec import QueryTemperature
from gptmanager.testing import RecordingCallbacks

pytest.importorskip("transformers", reason="transformers is not installed")
ALL = [*FAMILY_CONFIGS, *VARIANTS]


def test_every_family_of_the_table_has_a_line_here() -> None:
    # of which transformers has no text model alone; see test_wrappers
    assert {*FAMILY_CONFIGS, "qwen3_vl_moe_text"} == set(FAMILIES)


def test_the_tensors_of_a_family_fill_each_row_of_its_parameters_once() -> None:
    for name, given in {**FAMILY_CONFIGS, **VARIANTS}.items():
        spec = read_spec({"model_type": name.partition(" ")[0], **given})
        shapes, filled = parameter_shapes(spec), Counter[str]()
        of_tensors = [it for it in place_tensors(spec).values() if not (it.twin or it.scale)]
        found = [(it.parameter, run) for it in of_tensors for run in runs(it, shapes[it.parameter])]
        for parameter, run in sorted(found, key=lambda it: it[1].row):
            assert run.row == filled[parameter], f"{name}: {parameter}"
            filled[parameter] += len(run.source)
        rows = {key: shape[0] for key, shape in shapes.items() if "cache_scales" not in key}
        assert filled == rows, name
        for kind in {layer.attention.recurrent for layer in spec.layers} - {None}:
            for is_joined in (True, False):
                check_modules(kind, is_joined)


def check_modules(kind: RecurrentKind, is_joined: bool) -> None:
    """Check that the modules of adapters cover each row of their matrices once."""
    shapes, covered = kind.parameters(64), Counter[tuple[str, int]]()
    for _, matrix, rows in kind.modules(is_joined):
        covered.update((matrix, row) for row in rows)
    matrices = {matrix for matrix, _ in covered}
    assert covered == Counter(
        (matrix, row) for matrix in matrices for row in range(shapes[f"{matrix}.weight"][0])
    )


def test_a_million_experts_are_refused_before_they_are_listed() -> None:
    config = {**FAMILY_CONFIGS["qwen2_moe"], "model_type": "qwen2_moe", "num_experts": 10**6}
    with pytest.raises(ConfigError, match="config.json: 4000000 experts in all layers: at most"):
        read_spec(config)


def test_low_scores_of_experts_of_lfm2_are_weighed_as_in_transformers() -> None:
    config = {**FAMILY_CONFIGS["lfm2_moe"], "model_type": "lfm2_moe"}
    router = new_model(config).model.layers[3].feed_forward.gate
    torch.nn.init.eye_(router.weight)
    torch.manual_seed(1)
    hidden, bias = torch.randn(7, 64) - 15, torch.randn(4)
    logits, exact, _ = router(hidden, bias)
    experts = read_spec(config).layers[3].mlp.experts
    assert experts is not None
    _, weights = choose_experts(logits, experts.routing, bias)
    assert exact.sum(1).max() < 0.99 * experts.routing.factor  # far from the sum of high scores
    assert torch.allclose(weights.sort().values, exact.sort().values)


def test_phimoe_chooses_and_weighs_experts_as_transformers() -> None:
    phimoe = pytest.importorskip(
        "transformers.models.phimoe.modeling_phimoe", reason="compares with transformers"
    )
    experts = read_spec(family_config("phimoe")).layers[0].mlp.experts
    logits = torch.randn(99, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    exact, expected = phimoe.sparsemixer(logits, experts.routing.tolerance / 2, training=False)

    chosen, weights = choose_experts(logits, experts.routing, None)

    assert torch.equal(chosen, expected) and torch.allclose(weights, exact)
    assert 0.1 < (weights == 1).float().mean() < 0.9  # of experts that no other one is close to


@pytest.mark.parametrize(("length", "factor"), [(160, 1.2), (161, 1.3)])
def test_phimoe_has_two_factors_of_attention(length: int, factor: float) -> None:
    rope = read_spec(family_config("phimoe"), max_seq_len=length).ropes[0]
    assert rope is not None and rope.attention_factor == factor
    plain = {
        **family_config("mixtral"),
        "rope_parameters": FAMILY_CONFIGS["phimoe"]["rope_parameters"],
    }
    with pytest.raises(ConfigError, match="short_mscale = 1.2: not supported with the rope type"):
        read_spec(plain)


def test_a_rope_scaling_replaces_all_that_a_family_has_by_default() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
    config = {**BASE, "model_type": "olmo3", "sliding_window": 8}
    plain = {"rope_type": "default", "rope_theta": 500000.0}
    kinds = {"full_attention": {**plain, **yarn}, "sliding_attention": plain}
    scaled = read_spec({**config, "rope_scaling": yarn})
    assert scaled == read_spec({**config, "rope_parameters": kinds})
    config = {**BASE, "model_type": "gpt_oss", "num_local_experts": 4, "rope_theta": 500.0}
    assert {rope.theta for rope in read_spec(config).ropes if rope} == {500.0}
    config = {**BASE, "model_type": "ministral3", "rope_scaling": yarn}
    assert read_spec(config).layers[0].attention.temperature is None


def test_a_rope_scaling_is_read_before_equal_rope_parameters() -> None:
    """transformers reads `rope_scaling` alone. So each value must be in it, or be the default."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
    old = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 40}
    config = {**BASE, "model_type": "llama"}
    with_theta, by_type = {**yarn, "rope_theta": 5e5}, {**old, "rope_theta": 5e5}
    for given in (
        {"rope_scaling": yarn, "rope_parameters": yarn, "rope_theta": 5e5},
        {"rope_scaling": old, "rope_parameters": with_theta, "rope_theta": 5e5},
        {"rope_scaling": by_type, "rope_parameters": yarn},
        {"rope_scaling": with_theta, "rope_parameters": with_theta, "rope_theta": 7.0},
    ):
        expected = new_model({**config, **given}).config.rope_parameters
        assert read_spec({**config, **given}) == read_spec({**config, "rope_parameters": expected})
        assert expected["rope_theta"] == 5e5
    for own in (with_theta, {**yarn, "factor": 2.0}, {"rope_type": "linear", "factor": 4.0}):
        with pytest.raises(ConfigError, match="rope_scaling = .*: contradicts rope_parameters = "):
            read_spec({**config, "rope_scaling": yarn, "rope_parameters": own})


def test_an_original_length_outside_of_the_rope_parameters_counts_for_temperatures() -> None:
    """transformers moves it into these parameters."""
    rope = {"rope_type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
    rope |= {"factor": 4.0, "llama_4_scaling_beta": 0.3}
    given = {**FAMILY_CONFIGS["ministral3"], "model_type": "ministral3"}
    del given["rope_parameters"]
    old = {**given, "rope_theta": 1e4, "rope_scaling": rope, "original_max_position_embeddings": 8}
    moved = new_model(old).config.rope_parameters
    assert moved["original_max_position_embeddings"] == 8

    spec = read_spec(old)
    assert spec == read_spec({**given, "rope_parameters": moved})
    assert spec.layers[0].attention.temperature == QueryTemperature(0.3, 8)
    config = {**FAMILY_CONFIGS["ministral3"], "model_type": "ministral3"}
    spec = read_spec({**config, "original_max_position_embeddings": 40})
    assert spec.layers[0].attention.temperature == QueryTemperature(0.3, 8)  # RoPE is not scaled
    spec = read_spec({**FAMILY_CONFIGS["llama4_text"], "model_type": "llama4_text"})
    found = {layer.attention.temperature for layer in spec.layers}
    assert found == {None, QueryTemperature(0.3, 8, offset=1)}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}
    kinds = {f"{it}_attention": {**yarn, "rope_theta": 1e4} for it in ("full", "sliding")}
    config = {**BASE, "model_type": "olmo3", "sliding_window": 8, "rope_parameters": kinds}
    spec = read_spec({**config, "original_max_position_embeddings": 40})
    assert {rope.original_max_positions for rope in spec.ropes if rope} == {8}


def test_proportional_rope_has_the_share_of_the_family() -> None:
    config = {**FAMILY_CONFIGS["glm"], "model_type": "glm", "rope_theta": 1e4}
    del config["rope_parameters"]
    rope = read_spec({**config, "rope_scaling": {"rope_type": "proportional"}}).ropes[0]
    assert rope is not None and (rope.share, rope.dim) == (0.5, 16)


def test_the_first_configs_of_phi3_call_longrope_su() -> None:
    config = {**FAMILY_CONFIGS["phi3"], "model_type": "phi3", "rope_parameters": None}
    rope = {"type": "longrope", "short_factor": [1.5] * 8, "long_factor": [3.0] * 8}
    rope["original_max_position_embeddings"] = 16
    now, first = ({**config, "rope_scaling": {**rope, "type": it}} for it in ("longrope", "su"))

    assert new_model(first).config.rope_parameters["rope_type"] == "longrope"
    assert read_spec(first) == read_spec(now)


@pytest.mark.parametrize("name", ["gpt_neox", "opt", "phi3"])
def test_a_tied_checkpoint_may_have_either_matrix_or_both(name: str) -> None:
    config, state = checkpoint(family_model(name))
    [head] = {"lm_head.weight", "embed_out.weight"} & state.keys()
    [embedding] = [key for key in state if key.endswith(("embed_tokens.weight", "embed_in.weight"))]
    one = {embedding: state[embedding]}, {head: state[embedding]}
    rest = {key: it for key, it in state.items() if key not in (head, embedding)}
    tied = {**config, "tie_word_embeddings": True}
    models = [load_model((tied, {**rest, **own})) for own in (*one, {**one[0], **one[1]})]
    first, *others = [PagedDriver(model, 1).forward([(0, SHORT)]) for model in models]
    assert all(torch.equal(first, other) for other in others)


def test_fields_without_effect_are_not_refused() -> None:
    same = {"hidden_act": "gelu_pytorch_tanh", "norm_eps": 1e-6}
    config = {**FAMILY_CONFIGS["gemma2"], "model_type": "gemma2"}
    assert read_spec({**config, **same}) == read_spec(config)
    of_others = {
        **dict.fromkeys(("compression_ratio", "embedding_multiplier", "logits_scaling"), 1.0),
        **dict.fromkeys(("residual_multiplier", "routed_scaling_factor"), 1.0),
        **{"n_group": 1, "topk_group": 1, "num_experts": 0, "num_local_experts": 0},
        **{"is_causal": True, "is_encoder_decoder": False, "add_cross_attention": False},
        **{"partial_rotary_factor": 1.0, "scale_attn_weights": True},
    }
    config = {**FAMILY_CONFIGS["llama"], "model_type": "llama"}
    assert read_spec({**config, **of_others}) == read_spec(config)
    every_layer = {"mlp_only_layers": [0, 1, 2, 3], "decoder_sparse_step": 1}
    config = {**FAMILY_CONFIGS["qwen3_moe"], "model_type": "qwen3_moe", **every_layer}
    assert not any(layer.mlp.experts for layer in read_spec(config).layers)
    # transformers writes the pattern 0 if there is no window
    config = {**FAMILY_CONFIGS["exaone4"], "model_type": "exaone4", "sliding_window_pattern": 0}
    assert {*read_spec({**config, "sliding_window": None}).windows} == {None}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(6)
def test_float64_logits_are_those_of_transformers(name: str) -> None:
    for sequence, logits in all_logits(name, dtype="float64"):
        exact = expected(name, sequence)
        assert (logits - exact).abs().max() < 1e-5 * exact.std()
        assert torch.equal(logits.argmax(-1), exact.argmax(-1))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.every(10)
def test_compiled_logits_are_those_of_transformers(name: str) -> None:
    for sequence, logits in all_logits(name, dtype="float32"):
        exact = expected(name, sequence)
        assert (logits - exact).abs().max() < 2e-4 * exact.std()


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
@pytest.mark.every(6)
def test_greedy_tokens_are_those_of_transformers(name: str) -> None:
    prompts = [LONG, tokens(3, 5), tokens(11, 6)]
    requests = [InferenceRequest.from_tokens(i, own, 12) for i, own in enumerate(prompts)]
    host = RecordingCallbacks(requests)
    params = OptionalParams(
        dtype="float32",
        enable_chunked_context=True,
        max_num_tokens=24,
        kv_cache_config=KvCacheConfig(tokens_per_block=8, max_tokens=256),
    )
    given = family_folder(name), ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(*given, optional_params=params, **host.keywords()) as manager:
        manager.wait_idle()
    for number, prompt in enumerate(prompts):
        generated = host.output(number)[len(prompt) :]
        assert len(generated) == 12
        assert is_greedy(family_model(name), prompt, generated)


@pytest.mark.slow
def test_200_requests_over_few_slots_have_the_tokens_of_transformers() -> None:
    name = "qwen3_5_text"

    def continued(prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
        options = OptionalParams(dtype="float32", exclude_input_in_output=True)
        found = generate(family_folder(name), prompts, count, optional_params=options)
        for prompt, own in zip(prompts, found, strict=True):
            assert len(own) == count and is_greedy(family_model(name), prompt, own)
        return found

    for cache in ({}, {"enable_block_reuse": True, "max_tokens": 80}):
        host = run_many(family_folder(name), continued, dtype="float32", cache=cache)
        assert host.total("Paused Requests") > 0


@pytest.mark.parametrize("name", FAMILY_CONFIGS)
@pytest.mark.every(64)
def test_bfloat16_diverges_no_more_than_in_transformers(name: str) -> None:
    narrow = deepcopy(family_model(name)).to(torch.bfloat16)
    model = load_model(family_folder(name), dtype="bfloat16")
    # Rounding sends a few tokens to other experts, there and here. Which ones is chance, so a mean
    # needs many tokens.
    has_experts = any("expert" in key for key in narrow.config.to_dict())
    ours, theirs = 0.0, 0.0
    for sequence in (tokens(60, seed) for seed in range(100, 148 if has_experts else 106)):
        exact = exact_logits(exact_model(name), sequence)
        driver = PagedDriver(model, 1, dtype=torch.bfloat16)
        ours += divergence(exact, driver.forward([(0, sequence)]))
        theirs += divergence(exact, expected_logits(narrow, sequence))
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("name", [it for it in FAMILIES if it not in RENAMED])
def test_absent_fields_have_the_defaults_of_transformers(name: str) -> None:
    known, family = default_config(name), FAMILIES[name]
    full: dict[str, Any] = known.to_dict()
    if family.rotary:
        theta = known.default_theta
        theta = theta["global"] if isinstance(theta, dict) else theta
        assert family.defaults["rope_theta"] == theta
    if name == "glm4_moe":  # its default heads do not divide its default hidden size
        full["num_attention_heads"] = 64
    further: dict[str, Any] = {}
    if name == "granitemoehybrid":  # its default layers are Mamba's, with experts
        further = {"layer_types": ["attention"] * full["num_hidden_layers"], "num_local_experts": 0}
    if name == "bamba":
        further = {"attn_layer_indices": [1]}
    if name == "nemotron_h":
        further = {"layers_block_type": full["layers_block_type"]}
    if name == "lfm2_moe":
        further = {"layer_types": ["full_attention"] * full["num_hidden_layers"]}
    if name == "deepseek_v2":  # it has no default
        further = {"num_experts_per_tok": 6}
    legacy = ("n_embd", "n_layer", "n_head", "n_inner", "ffn_dim")
    sizes = [*BASE, *legacy]
    needed = ("vocab", "hidden_size", "layers", "attention_heads", "intermediate", *legacy)
    minimal = {
        key: full[key] for key in sizes if key in full and any(word in key for word in needed)
    }
    minimal |= further
    full |= further
    assert read_spec({"model_type": name, **minimal}) == read_spec({**full, "dtype": "float32"})


def test_the_page_lists_every_family() -> None:
    page = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
    table = page.split("## Does my model run?")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ", table, re.M)
    assert rows[1:] == [(name, family.title) for name, family in FAMILIES.items()]  # after the head
    assert all(f"`{name}`" in page for name in TEXT_FAMILIES if not name.endswith("_text"))
