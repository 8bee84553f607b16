"""Models that transformers computes, with our attention and matmuls: the same logits and tokens."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from checkpoints import PagedDriver
from hf_models import (
    ARCHITECTURES,
    NOT_NATIVE,
    PARTS,
    REFUSED,
    greedy,
    in_pieces,
    new_network,
    prompts,
    table,
    through_transformers,
)
from safetensors.torch import load_file, save_file

from gptmanager import KvCacheConfig, OptionalParams
from gptmanager.assembly.loading import load
from gptmanager.callbacks import generate
from gptmanager.config import ParallelConfig
from gptmanager.errors import ConfigError, RequestError
from gptmanager.kernels import CpuKernels
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.hf.attention import HOLDER, StepHolder, note_call
from gptmanager.models.hf.library import load_transformers_library
from gptmanager.models.hf.linears import PackedLinear
from gptmanager.models.hf.loading import load_with_transformers
from gptmanager.models.hf.network import TransformersModel
from gptmanager.models.hf.probe import _is_causal
from gptmanager.models.hf.sizes import uses_transformers


@pytest.mark.every(18)
@pytest.mark.parametrize("name", [it for it in ARCHITECTURES if it not in REFUSED])
def test_an_architecture_answers_as_in_transformers(name: str) -> None:
    network = new_network(name)
    sequences, asked = prompts(30, 19), prompts(40, 7, 60, 3, 22, 31)
    with torch.inference_mode():
        exact = [
            network(input_ids=torch.tensor([it]), use_cache=False).logits[0] for it in sequences
        ]
    expected = greedy(network, asked, 6)
    model = through_transformers(network)

    for own, theirs in zip(in_pieces(model, sequences), exact, strict=True):
        assert (own - theirs).abs().max() < 1e-5 * theirs.std()
        assert torch.equal(own.argmax(-1), theirs.argmax(-1))
    # chunks, and pauses: the cache has room for a part of the requests
    cache = KvCacheConfig(max_tokens=112, tokens_per_block=16, enable_block_reuse=True)
    params = OptionalParams(
        kv_cache_config=cache, max_num_tokens=24, enable_chunked_context=True, max_seq_len=80
    )
    assert generate(model, asked, 6, optional_params=params) == expected


def test_transformers_that_refuses_its_dependencies(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ImportError("tokenizers>=0.23.1 is required, but found tokenizers==0.21.0")

    monkeypatch.setattr("importlib.import_module", refuse)
    with pytest.raises(ConfigError, match="transformers, which cannot be imported: .*tokenizers>="):
        load_transformers_library()


@pytest.mark.parametrize("name", REFUSED)
def test_what_attention_over_pages_cannot_compute_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"model_backend = 'transformers': .*: {REFUSED[name]}"):
        through_transformers(new_network(name))


WINDOWED = {
    "use_sliding_window": True,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}


@pytest.mark.parametrize(
    ("name", "fields", "windows"), [("qwen2_moe", WINDOWED, {8, None}), ("phimoe", {}, {8})]
)
def test_a_window_that_is_only_in_the_mask_is_applied(
    name: str, fields: dict[str, Any], windows: set[int | None]
) -> None:
    """Layers of Qwen2-MoE pass no window to attention; those of Phi-3.5-MoE do not have it."""
    network = new_network(name, sliding_window=8, **fields)
    sequences = prompts(30, 19)
    with torch.inference_mode():
        exact = [network(input_ids=torch.tensor([it])).logits[0] for it in sequences]
    model = through_transformers(network)

    assert {it.window for it in model.attention_shapes} == windows
    for own, theirs in zip(in_pieces(model, sequences), exact, strict=True):
        assert (own - theirs).abs().max() < 1e-5 * theirs.std()


def test_a_network_that_always_returns_all_logits() -> None:
    """It has no argument `logits_to_keep`."""
    network, [sequence] = new_network("mistral"), prompts(30)
    given = network.forward
    network.forward = lambda position_ids=None, **more: given(position_ids=position_ids, **more)
    with torch.inference_mode():
        exact = network(input_ids=torch.tensor([sequence])).logits[0]
    [own] = in_pieces(through_transformers(network), [sequence])
    assert (own - exact).abs().max() < 1e-5 * exact.std()


@pytest.mark.parametrize("window", [131_072, 200_000, 2**31 - 1])
def test_a_wide_window_that_is_only_in_the_mask_is_found(window: int) -> None:
    model = through_transformers(new_network("qwen2_moe", sliding_window=window, **WINDOWED))
    assert {it.window for it in model.attention_shapes} == {window, None}
    model = through_transformers(new_network("phimoe", sliding_window=window))
    assert {it.window for it in model.attention_shapes} == {window}


@pytest.mark.parametrize(("query_dim", "value_dim"), [(8, 16), (16, 8)])
def test_pages_are_as_wide_as_the_wider_of_keys_and_values(query_dim: int, value_dim: int) -> None:
    module, holder = torch.nn.Module(), StepHolder()
    vars(module).update({"layer_idx": 0, HOLDER: holder})
    query, value = torch.zeros(1, 2, 3, query_dim), torch.zeros(1, 2, 3, value_dim)
    note_call(module, query, query, value, None)
    assert holder.calls[0].shape.head_dim == 16


def test_a_mask_that_always_shows_the_first_token_is_not_a_window() -> None:
    def window(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (key <= query) & (key > query - 8)

    def sink(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return window(batch, head, query, key) | (key == 0)

    assert _is_causal(window, 8, 8) and not _is_causal(sink, 8, 8)


@pytest.mark.parametrize(("name", "fields"), [("qwen2_moe", WINDOWED), ("mistral", {})])
def test_a_window_that_no_sequence_can_fill_is_refused(name: str, fields: dict[str, Any]) -> None:
    network = new_network(name, sliding_window=2**63, **fields)
    with pytest.raises(ConfigError, match=f"layer 0 has a window of {2**63} tokens, more than"):
        through_transformers(network)


@pytest.mark.parametrize("window", [0, -8])
def test_a_window_of_no_tokens_is_refused(window: int) -> None:
    """transformers fails on such a model, or its attention implementations differ."""
    network = new_network("mistral", sliding_window=window)
    with pytest.raises(ConfigError, match=f"layer 0 has a window of {window} tokens: it must be"):
        through_transformers(network)


def test_logits_that_cannot_be_compared_are_refused() -> None:
    network = new_network("llama")
    with torch.no_grad():
        network.model.embed_tokens.weight[0] = torch.nan
    with pytest.raises(ConfigError, match="its logits are NaN while attention returns zeros"):
        through_transformers(network)
    network = new_network("phi")
    with torch.no_grad():
        network.lm_head.bias[5] = -torch.inf  # a token that is never generated
    (logits,) = in_pieces(through_transformers(network), prompts(19))
    assert (logits[:, 5] == -torch.inf).all() and logits[:, 6:].isfinite().all()


def test_a_refused_model_with_its_own_attention_learns_what_is_needed() -> None:
    with pytest.raises(ConfigError) as caught:
        through_transformers(new_network("falcon"))
    assert str(caught.value) == (
        "model_backend = 'transformers': FalconForCausalLM: its layers do not call the attention "
        "interface. Each layer must call transformers' AttentionInterface once, because attention "
        "over the pages of the KV cache is computed there. docs/models.md lists the architectures "
        "that run, natively or through transformers"
    )


def test_the_page_has_the_table_of_architectures() -> None:
    page = Path("docs/models.md").read_text()
    own = page.split("### Architectures that were tried")[1].split("\n\n")[2]
    assert own == table(), "run PYTHONPATH=tests/support python tests/support/hf_models.py"


@pytest.mark.parametrize("name", PARTS)
def test_a_part_of_a_model_of_transformers_is_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="transformers has no model of this architecture"):
        load_with_transformers(tmp_path, CpuKernels())


def test_recurrent_layers_of_granite_are_refused() -> None:
    layers = ["mamba", "attention"] * 2
    with pytest.raises(ConfigError, match="layers 0, 2 do not call the attention interface"):
        through_transformers(new_network("granitemoehybrid", layer_types=layers))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of an architecture that the table of families does not have."""
    path = tmp_path_factory.mktemp("hf") / NOT_NATIVE
    new_network(NOT_NATIVE).save_pretrained(path)
    return path


def options(**more: Any) -> OptionalParams:
    return OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=512), **more)


def test_the_log_says_which_backend_computes(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="gptmanager")
    expected = greedy(new_network(NOT_NATIVE), prompts(5, 9), 4)

    parts: list[tuple[Any, ...]] = []
    given = options(on_progress=lambda *part: parts.append(part))
    assert generate(str(folder), prompts(5, 9), 4, optional_params=given) == expected
    assert [part for part in parts if part[0] == "weights"][-1] == ("weights", 17, 17)
    assert f"{NOT_NATIVE} is loaded through transformers; matrices: 17 in float32" in caplog.text
    caplog.clear()
    llama = "examples/tiny_llama"
    own, theirs = (
        generate(llama, prompts(5), 4, optional_params=options(model_backend=kind, dtype="float32"))
        for kind in ("auto", "transformers")
    )
    assert own == theirs
    assert "tiny_llama is loaded natively" in caplog.text
    assert "tiny_llama is loaded through transformers" in caplog.text
    with pytest.raises(ConfigError, match=f"model_type = '{NOT_NATIVE}': must be one of"):
        generate(str(folder), prompts(5), 4, optional_params=options(model_backend="native"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"deterministic": True}, "deterministic = True is refused"),
        (
            {"kv_cache_config": KvCacheConfig(max_attention_window=8)},
            "max_attention_window = 8 is refused",
        ),
        ({"model_backend": "vllm"}, "model_backend = 'vllm' must be one of"),
    ],
)
def test_options_that_it_does_not_have_are_refused(
    folder: Path, given: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(str(folder), prompts(5), 4, optional_params=OptionalParams(**given))


def test_ranks_and_adapters_are_refused(folder: Path) -> None:
    ranks = OptionalParams(parallel_config=ParallelConfig(2, 1))
    collectives: Any = object()
    with pytest.raises(ConfigError, match="parallel_config = .* is refused"):
        load(str(folder), ranks, CpuKernels(), torch.device("cpu"), collectives=collectives)
    with pytest.raises(RequestError, match="lora_task_id is refused: the model takes no adapters"):
        generate(through_transformers(new_network("llama")), prompts(5), 4, lora_task_id=3)


def test_folders_that_transformers_cannot_load_are_refused(folder: Path, tmp_path: Path) -> None:
    params = options(model_backend="transformers")
    (tmp_path / "config.json").write_text('{"model_type": "no-such", "auto_map": {"A": "b.C"}}')
    with pytest.raises(
        ConfigError, match="'no-such': transformers does not have this architecture"
    ):
        generate(str(tmp_path), prompts(5), 4, optional_params=params)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ConfigError, match="its weights are pickles, which can run code"):
        generate(str(tmp_path), prompts(5), 4, optional_params=params)
    (tmp_path / "pytorch_model.bin").unlink()
    quantized = json.loads((folder / "config.json").read_text())
    quantized["quantization_config"] = {"quant_method": "bitsandbytes"}
    (tmp_path / "config.json").write_text(json.dumps(quantized))
    with pytest.raises(ConfigError, match="only 'native' reads quantized folders"):
        generate(str(tmp_path), prompts(5), 4, optional_params=params)
    with pytest.raises(ConfigError, match="model_backend = 'transformers' needs a folder"):
        generate(({}, {}), prompts(5), 4, optional_params=params)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("vocab_size", 1 << 36, "describes [0-9]+ parameters: the checkpoint has only [0-9]+"),
        ("num_hidden_layers", 1 << 40, "num_hidden_layers = 1099511627776: .* has only"),
    ],
)
def test_a_config_that_its_tensors_contradict_sizes_nothing(
    folder: Path, tmp_path: Path, field: str, value: int, message: str
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, field: value}))
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises(ConfigError, match=message):
        generate(str(tmp_path), prompts(5), 4, optional_params=options())


def test_only_the_text_model_of_a_wrapper_is_loaded(tmp_path: Path) -> None:
    """Of Gemma 3n, for example: the whole model needs further libraries."""
    network = new_network("gemma3n_text")
    network.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    wrapped = {name.replace("model.", "model.language_model.", 1): it for name, it in state.items()}
    wrapped["model.vision_tower.weight"] = torch.ones(2)
    save_file(wrapped, tmp_path / "model.safetensors", {"format": "pt"})
    text = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "gemma3n", "text_config": text})
    )
    assert uses_transformers(tmp_path, "auto")
    model = load_with_transformers(tmp_path, CpuKernels(), dtype="float32", max_seq_len=80)
    (prompt,) = prompts(30)
    with torch.inference_mode():
        exact = network(input_ids=torch.tensor([prompt]), use_cache=False).logits[0]
    (logits,) = in_pieces(model, [prompt])
    assert (logits - exact).abs().max() < 1e-5 * exact.std()


def test_missing_tensors_are_named(folder: Path, tmp_path: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    extra = {"model.other": tensors.pop("model.layers.1.mlp.dense_h_to_4h.weight")}
    save_file({**tensors, **extra}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(
        ConfigError, match="tensors are missing: model.layers.1.mlp.dense_h_to_4h.weight"
    ):
        generate(str(tmp_path), prompts(5), 4, optional_params=options())


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_linear_layers_are_stored_in_few_bits(folder: Path, kind: Any) -> None:
    network = new_network(NOT_NATIVE)
    head = network.get_output_embeddings()
    names = {name for name, it in network.named_modules() if it is head}
    exact = in_pieces(through_transformers(new_network(NOT_NATIVE)), prompts(20))[0]
    model = through_transformers(network, kind_of=lambda name: "int8" if name in names else kind)

    stored = {type(it.matrix) for it in network.modules() if isinstance(it, PackedLinear)}
    assert (Int4Matrix in stored) == (kind == "int4")
    error = (in_pieces(model, prompts(20))[0] - exact).std() / exact.std()
    # without a matrix unit, the activations of a prompt are int8, too
    assert 0 < error < (0.04 if kind == "int8" else 0.3)
    assert model.nbytes < 0.6 * through_transformers(new_network(NOT_NATIVE)).nbytes


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
@pytest.mark.parametrize("name", [NOT_NATIVE, "mixtral", "gpt2"])
def test_a_step_may_need_no_logits(name: str, kind: Any) -> None:
    """All rows of the step are chunks, of which none is the last of its prompt."""
    model = through_transformers(new_network(name), kind_of=lambda own: kind)
    driver = PagedDriver(model, 1)
    assert driver.forward([(0, prompts(9)[0])], sample=[]).shape == (0, 256)


def test_embeddings_of_a_prompt_take_the_place_of_tokens() -> None:
    network = new_network(NOT_NATIVE)
    table = network.get_input_embeddings().weight.detach().clone()
    model = through_transformers(network)
    plain, tabled = prompts(9, 9)
    expected = generate(model, [plain], 5)
    # virtual tokens 256 and on are rows of the table
    found = generate(
        model,
        [[256 + n for n in range(4)] + plain[4:]],
        5,
        prompt_embedding_table=table[plain[:4]],
        prompt_vocab_size=4,
    )
    assert found == expected


@pytest.mark.every(2)
@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_embeddings_of_a_prompt_do_not_change_a_neighbor(name: str) -> None:
    """Gemma looks up tokens in a second table, and so must know the neighbor's tokens."""
    second = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 256}
    model = through_transformers(new_network(name, **second))
    first, neighbor = prompts(9, 9)

    class Embedded:
        spec = model.spec

        def forward(self, batch: Batch, kv_pool: KvPool) -> torch.Tensor:
            given = {"prompt_index": torch.arange(4), "prompt_embeddings": torch.ones(4, 64)}
            return model.forward(replace(batch, **given), kv_pool)

    alone = [PagedDriver(model, 1).forward([(0, it)]) for it in (first, neighbor)]
    found = PagedDriver(Embedded(), 2).forward([(0, first), (1, neighbor)]).split(9)
    torch.testing.assert_close(found[1], alone[1])
    assert not torch.isclose(found[0], alone[0]).all(dim=1).any()


def test_two_managers_do_not_mix_their_steps() -> None:
    """The second step is asked for in another thread while the first one runs."""
    found: dict[int, torch.Tensor] = {}
    own, other = prompts(9, 7)

    def run(number: int, tokens: list[int]) -> None:
        found[number] = PagedDriver(model, 1).forward([(0, tokens)])

    class Interrupted(CpuKernels):
        def attention(self, *given: Any) -> torch.Tensor:
            if not threads:
                threads.append(Thread(target=run, args=(2, other)))
                threads[0].start()
                threads[0].join(0.02)
            return super().attention(*given)

    threads: list[Thread] = []
    model = TransformersModel(new_network(NOT_NATIVE), Interrupted())
    run(1, own)
    threads[0].join()
    run(3, other)
    assert torch.equal(found[2], found[3]) and found[1].isfinite().all()


def test_partial_reuse_of_blocks_with_heads_of_two_sizes() -> None:
    network = new_network("gemma4_text")
    [first] = prompts(30)
    others = [first[:n] + prompts(12)[0] for n in (21, 27, 11)]
    expected = greedy(network, others, 5)
    model = through_transformers(network)
    assert len({*model.spec.pages}) == 2
    cache = KvCacheConfig(max_tokens=256, tokens_per_block=16, enable_block_reuse=True)
    params = OptionalParams(kv_cache_config=cache, max_batch_size=1, max_seq_len=64)

    assert generate(model, [first, *others], 5, optional_params=params)[1:] == expected


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_a_longer_neighbor_does_not_change_a_request(kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [float(n + 2) for n in range(8)]}
    else:
        rope |= {"factor": 4.0}
    fields = {
        "rope_parameters": rope,
        "original_max_position_embeddings": 32,
        "max_position_embeddings": 128 if kind == "longrope" else 32,
    }
    name = "phi3" if kind == "longrope" else "llama"
    long, short = prompts(60, 12)
    found = {}
    for length in (24, 100):
        model = through_transformers(new_network(name, **fields), max_seq_len=length)
        [alone] = in_pieces(model, [short])
        found[length] = alone
        if length == 100:
            with_long = in_pieces(model, [long, short])[1]
            assert torch.equal(alone.argmax(-1), with_long.argmax(-1))
            assert (alone - with_long).abs().max() < 1e-4
    assert (found[24] - found[100]).abs().max() > 1e-2
    exact = new_network(name, **fields)
    with torch.inference_mode():  # a short sequence in transformers has the short frequencies
        theirs = exact(input_ids=torch.tensor([short]), use_cache=False).logits[0]
    assert (found[24] - theirs).abs().max() < 1e-4
