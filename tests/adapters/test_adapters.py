"""Adapters: which columns their modules are, by merged weights; what a request may bring."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import adapter_folders
import numpy as np
import pytest
import torch
from adapter_folders import GPT2, LLAMA, merge, module_name, random_pair, save_adapter
from checkpoints import CONFIGS, checkpoint, random_model

from gptmanager.callbacks import load_peft_adapter
from gptmanager.errors import AdapterError, InvalidRequestError
from gptmanager.kernels import Kernels
from gptmanager.models import load_model
from gptmanager.models.decoder.lora_modules import lora_modules
from gptmanager.request.adapter import AdapterTensors, read_lora
from gptmanager.request.adapter_modules import (
    LORA_MODULE_IDS,
    LORA_MODULE_NAMES,
    AdapterLimits,
    LoraModule,
)

# of a layer: a fused matrix of 6 queries, 2 keys and 2 values, a gated half of 5
MODULES = {
    0: LoraModule("qkv", 0, 10, 4),
    1: LoraModule("qkv", 0, 6, 4),
    5: LoraModule("up", 0, 5, 4),
}
LIMITS = AdapterLimits(MODULES, 3, torch.float32, 8)
CONFIG = [[1, 2, 2], [0, 0, 3], [1, 0, 1]]
WIDTH = 3 * 14 + 1


def numbers(width: int = WIDTH, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((3, width)).astype(np.float32)


def read(weights: Any, config: Any = CONFIG, **changes: Any) -> Any:
    return AdapterTensors(weights, config, LIMITS._replace(**changes)).read()


@pytest.mark.parametrize("name", ["llama_biased", "llama", "mistral", "qwen2", "qwen3", "gpt2_odd"])
def test_a_folder_of_peft_is_what_merged_weights_are(name: str, tmp_path: Path) -> None:
    """Every module, layer and rank of a checkpoint of transformers, by the library's own matrices:
    those of the merged checkpoint give what those of the base, and the adapter's A and B, do."""
    model = random_model(CONFIGS[name])
    config, state = checkpoint(model)
    transposed, generator = name == "gpt2_odd", torch.Generator().manual_seed(1)
    pairs, scales, ranks, alphas = {}, {}, {}, {}
    modules = itertools.product(range(3), (GPT2 if transposed else LLAMA).values())
    for rank, (layer, module_id) in enumerate(modules, 1):
        module = module_name(config["model_type"], layer, module_id)
        weight = state[f"{module}.weight"]
        pairs[module] = random_pair(weight, rank, generator, transposed)
        scales[module] = adapter_folders.scale(2 + layer, rank, root=transposed)
        ranks[module], alphas[rf"(model|transformer)\.\w+\.{layer}\..*"] = rank, 2 + layer
    save_adapter(tmp_path, pairs, use_rslora=transposed, rank_pattern=ranks, alpha_pattern=alphas)

    base = load_model((config, state), kernels=Kernels())
    merged = load_model((config, merge(state, pairs, scales, transposed)), kernels=Kernels())
    spec = base.spec
    table = lora_modules(spec)
    limits = AdapterLimits(table, spec.num_layers, spec.dtype, len(pairs))
    adapter = AdapterTensors(*load_peft_adapter(tmp_path), limits).read()

    assert len(adapter.rows) == len(pairs)
    for layer, matrix in itertools.product(range(3), ("qkv", "out", "up", "down")):
        weight = base.weights[f"layers.{layer}.{matrix}.weight"]
        x = torch.randn(5, weight.shape[1], generator=generator, dtype=torch.float64)
        got = x @ weight.double().T
        for module_id, module in table.items():
            row = adapter.rows.get((layer, module_id))
            if module.matrix == matrix and row is not None:
                columns = slice(module.first_column, module.first_column + module.num_columns)
                got[:, columns] += x @ row.a.double().T @ row.b.double().T
        expected = x @ merged.weights[f"layers.{layer}.{matrix}.weight"].double().T
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(x @ weight.double().T, expected, atol=0.1)


@pytest.mark.parametrize("name", [*CONFIGS])
def test_the_modules_of_a_matrix_cover_it_once(name: str) -> None:
    config, state = checkpoint(random_model(CONFIGS[name]))
    model = load_model((config, state), kernels=Kernels())
    table = lora_modules(model.spec)
    names = {LORA_MODULE_NAMES[module_id]: module for module_id, module in table.items()}
    assert ("mlp_gate" in names) == (model.spec.family != "gpt2")
    parts = [module for name, module in names.items() if name != "attn_qkv"]
    for matrix in ("qkv", "out", "up", "down"):
        rows, width = model.weights[f"layers.0.{matrix}.weight"].shape
        mine = sorted(m for m in parts if m.matrix == matrix)
        assert {module.input_width for module in mine} == {width}
        ends = list(itertools.accumulate(module.num_columns for module in mine))
        assert [module.first_column for module in mine] == [0, *ends[:-1]] and ends[-1] == rows
    assert names["attn_qkv"] == names["attn_q"]._replace(num_columns=sum(
        names[part].num_columns for part in ("attn_q", "attn_k", "attn_v")
    ))  # fmt: skip


def test_the_ids_are_those_of_the_documents() -> None:
    assert [LORA_MODULE_IDS[it] for it in ("attn_qkv", "attn_dense", "mlp_gate")] == [0, 4, 7]
    assert [LORA_MODULE_IDS[it] for it in ("cross_attn_qkv", "cross_attn_dense")] == [8, 12]
    assert [LORA_MODULE_IDS[it] for it in ("moe_h_to_4h", "mlp_router")] == [13, 17]


def test_a_row_is_a_and_then_b() -> None:
    weights = numbers()
    adapter = read(weights)

    assert [*adapter.rows] == [(0, 0), (0, 1), (2, 1)]
    row = adapter.rows[2, 1]
    assert (row.layer, row.module_id, row.rank, row.num_elements) == (2, 1, 2, 20)
    np.testing.assert_array_equal(row.a, weights[0, :8].reshape(2, 4))
    np.testing.assert_array_equal(row.b, weights[0, 8:20].reshape(6, 2))
    assert row.a.untyped_storage().data_ptr() == row.b.untyped_storage().data_ptr()
    assert adapter.num_elements == 20 + 42 + 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_form_of_the_same_numbers_is_the_same_adapter(dtype: torch.dtype) -> None:
    weights = torch.from_numpy(numbers()).to(dtype)
    expected = read(weights, dtype=dtype)
    assert {row.values.dtype for row in expected.rows.values()} == {dtype}
    array = weights.float().numpy()
    frozen = array.astype(">f8")
    frozen.flags.writeable = False
    forms = [
        (weights[None], np.array([CONFIG], dtype=np.int32)),
        (weights.clone().requires_grad_(), torch.tensor(CONFIG, dtype=torch.uint8)),
        (weights.T.contiguous().T, CONFIG),
        (array, np.array(CONFIG)),
        (frozen, CONFIG),
        (array.astype(np.longdouble)[:, ::-1][:, ::-1], CONFIG),
        (array.tolist(), CONFIG),
    ]
    for given, config in forms:
        adapter = read(given, config, dtype=dtype)
        assert adapter.digest == expected.digest
        for key, row in expected.rows.items():
            assert torch.equal(row.values, adapter.rows[key].values)


def test_the_numbers_are_copied() -> None:
    for weights in (numbers(), torch.from_numpy(numbers())):
        adapter = read(weights)
        before = adapter.rows[0, 0].values.clone()
        weights[:] = 0
        assert torch.equal(adapter.rows[0, 0].values, before)


def test_the_digest_is_of_the_content() -> None:
    weights, order = numbers(), [2, 0, 1]
    digest = read(weights).digest
    padded = np.full((3, 99), np.nan, dtype=np.float32)
    for row, (module_id, _, rank) in enumerate(CONFIG):
        length = rank * MODULES[module_id].width
        padded[row, :length] = weights[row, :length]
    assert read(padded).digest == digest
    assert read(weights[order], [CONFIG[i] for i in order]).digest == digest

    others = [read(weights[:2], CONFIG[:2]).digest, read(weights, dtype=torch.float16).digest]
    for row in range(3):
        changed = weights.copy()
        changed[row, 9] += 1
        others.append(read(changed).digest)
    for row, column, value in ((0, 1, 1), (2, 1, 1), (2, 2, 2), (1, 2, 2), (2, 0, 5)):
        config = [[*it] for it in CONFIG]
        config[row][column] = value
        others.append(read(weights, config).digest)
    assert len({digest, *others}) == 1 + len(others)


def test_padding_of_any_size_is_never_looked_at() -> None:
    wide = torch.zeros(1, 1).expand(3, 2**40)
    assert read(wide).num_elements == 72
    assert read(np.broadcast_to(np.float16(1), (3, 2**40))).num_elements == 72


SPOILT = numbers()
SPOILT[1, 41] = np.inf


@pytest.mark.parametrize(
    ("weights", "config", "error", "text"),
    [
        (numbers(), [*CONFIG, [5, 0, 1]], InvalidRequestError, "has 3 rows, lora_config 4"),
        (numbers()[0], CONFIG, InvalidRequestError, f"shape [{WIDTH}], expected [n, width]"),
        (numbers()[None, None], CONFIG, InvalidRequestError, "lora_weights has shape [1, 1, 3"),
        (numbers()[:0], CONFIG, InvalidRequestError, "lora_weights has shape [0, "),
        (np.stack([numbers()] * 2), CONFIG, InvalidRequestError, "lora_weights has shape [2, 3"),
        (numbers().astype(int), CONFIG, InvalidRequestError, "dtype int64, expected a float"),
        (torch.ones(3, 50) == 1, CONFIG, InvalidRequestError, "dtype torch.bool, expected a float"),
        (torch.ones(3, 50, device="meta"), CONFIG, InvalidRequestError, "cannot be read"),
        (torch.ones(3, 50).to_sparse(), CONFIG, InvalidRequestError, "cannot be read"),
        ("abc", CONFIG, InvalidRequestError, "lora_weights is of type str"),
        (None, CONFIG, InvalidRequestError, "nullptr when calling lora_weights"),
        (SPOILT, CONFIG, InvalidRequestError, "lora_weights[1, 41] = inf is not finite"),
        (numbers()[:, :41], CONFIG, AdapterError, "lora_weights[1] has 41 elements: 0 (attn_qkv) "
         "of layer 0 needs at least 3 * 4 + 10 * 3 = 42"),
        (numbers(), np.array(CONFIG, float), InvalidRequestError, "lora_config has dtype float64"),
        (numbers(), [[1, 2], [0, 0], [1, 0]], InvalidRequestError, "expected [n, 3] or [1, n, 3]"),
        (numbers(), [[], [], []], InvalidRequestError, "lora_config has shape [3, 0]"),
        (numbers(), [[1, 2, 2], [0, 0, True], [1, 0, 1]], InvalidRequestError, "[1][2] = True"),
        (numbers(), [[22, 2, 2], *CONFIG[1:]], InvalidRequestError,
         "lora_config[0]: module_id = 22 is outside 0..21"),
        (numbers(), [[-1, 2, 2], *CONFIG[1:]], InvalidRequestError, "module_id = -1 is outside"),
        (numbers(), [*CONFIG[:2], [8, 0, 1]], AdapterError, "lora_config[2]: module_id = 8 "
         "(cross_attn_qkv): the model has only 0 (attn_qkv), 1 (attn_q), 5 (mlp_h_to_4h)"),
        (numbers(), [*CONFIG[:2], [14, 0, 1]], AdapterError, "module_id = 14 (moe_4h_to_h)"),
        (numbers(), [*CONFIG[:2], [1, 3, 1]], AdapterError,
         "lora_config[2]: layer_idx = 3 is outside 0..2"),
        (numbers(), [*CONFIG[:2], [1, -1, 1]], InvalidRequestError, "layer_idx = -1 is less than"),
        (numbers(), [*CONFIG[:2], [1, 0, 0]], InvalidRequestError, "adapter_size = 0 is less than"),
        (numbers(99), [*CONFIG[:2], [1, 0, 9]], AdapterError,
         "lora_config[2]: adapter_size = 9 is more than max_adapter_size = 8"),
        (numbers(), [*CONFIG[:2], [1, 2, 1]], InvalidRequestError,
         "lora_config[2] = [1, 2, 1]: 1 (attn_q) of layer 2 is in row 0 already"),
        (numbers(), [[2**70, 0, 1]] * 3, InvalidRequestError, f"number {2**70}, expected"),
        (numbers(), [[1, 0, 1]] * 10, AdapterError, "lora_config has 10 rows, expected at most 9"),
    ],
)  # fmt: skip
def test_a_tensor_that_is_not_an_adapter_of_the_model_is_refused(
    weights: Any, config: Any, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=re.escape(text)) as caught:
        read(weights, config)
    assert type(caught.value) is error


def test_the_highest_rank_and_the_last_layer_are_taken() -> None:
    adapter = read(np.ones((1, 80), dtype=np.float32), [[1, 2, 8]])
    assert adapter.rows[2, 1].a.shape == (8, 4)


def test_a_number_that_the_models_dtype_cannot_hold_is_refused_with_the_limit() -> None:
    weights = numbers()
    weights[2, 9] = 7e4
    text = r"lora_weights\[2, 9\] = 70000 is not finite in torch.float16: at most 65504"
    with pytest.raises(InvalidRequestError, match=text):
        read(weights, dtype=torch.float16)
    read(weights, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_numbers_are_finite_one_by_one_whatever_their_sum_is(dtype: torch.dtype) -> None:
    high = np.full((1, 80), 3e38, dtype=np.float64)
    adapter = read(high, [[1, 2, 8]], dtype=dtype)
    assert (adapter.rows[2, 1].a == torch.tensor(3e38, dtype=dtype)).all()
    for odd in ([np.inf, -np.inf], [np.nan, 0.0], [-np.inf, np.inf]):
        high[0, 7:9] = odd
        with pytest.raises(InvalidRequestError, match=rf"lora_weights\[0, 7\] = {odd[0]:g} is not"):
            read(high, [[1, 2, 8]], dtype=dtype)


def test_an_id_may_come_alone_and_nothing_else_may() -> None:
    weights = {"lora_weights": numbers(), "lora_config": CONFIG}
    task = {"lora_task_id": np.array([2**64 - 1], dtype=np.uint64)}
    assert read_lora({}, LIMITS) is None
    assert read_lora(task, LIMITS) == (2**64 - 1, None)
    inputs = read_lora(task | weights, LIMITS)
    assert inputs is not None and inputs.tensors is not None
    assert inputs.tensors.read().digest == read(numbers()).digest
    for tensors, text in (
        (weights, "Undefined tensor: lora_task_id, but lora_weights and lora_config are given"),
        (task | {"lora_weights": numbers()}, "Undefined tensor: lora_config, but lora_weights"),
        (task | {"lora_config": CONFIG}, "Undefined tensor: lora_weights, but lora_config"),
        ({"lora_weights": numbers()}, "Undefined tensor: lora_config, but lora_weights"),
        (weights | {"lora_task_id": -1}, r"lora_task_id = -1 is outside 0..18446744073709551615"),
        (weights | {"lora_task_id": 1.0}, "lora_task_id has dtype float64, expected an integer"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            read_lora(tensors, LIMITS)
