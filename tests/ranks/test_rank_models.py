"""A model split over ranks computes what it computes on one: every family, every layout."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from checkpoints import CONFIGS, PagedDriver, checkpoint, random_model, save_large
from rank_threads import World

from gptmanager.assembly.adapter_sizing import adapter_sizes
from gptmanager.config import PeftCacheManagerConfig
from gptmanager.errors import AdapterError, ConfigError
from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.gemm import matmul_plan
from gptmanager.kernels.gemm.int4_matrix import Int4Matrix
from gptmanager.memory import AdapterPool
from gptmanager.models import load_model
from gptmanager.peft_cache import AdapterRow, PageCopy
from gptmanager.peft_cache.layout import pack
from gptmanager.ranks.layout import RankLayout
from gptmanager.request.adapter import AdapterTensors

# (family, ranks of a stage, stages)
EVERY = [
    *((family, 2, 2) for family in CONFIGS),
    *(("llama", *layout) for layout in ((1, 3), (4, 2))),
    ("gpt2", 2, 1),
]
ODD_VOCABULARY = {"vocab_size": 95}

# (slot, tokens) rows of each step, and the packed tokens whose logits are wanted
STEPS = [
    ([(0, [1, 2, 94, 48, 47]), (1, [7] * 11)], None),
    ([(2, [90, 3]), (0, [5]), (1, [6])], [1, 2, 3]),
    ([(2, [4, 50, 60]), (0, [33]), (1, [93])], []),  # a chunk that is not the last, and no one asks
    ([(2, [9]), (0, [10]), (1, [11])], None),
]


@functools.cache
def source(name, **changes):
    return checkpoint(random_model(CONFIGS[name] | ODD_VOCABULARY | changes))


def run(model):
    driver = PagedDriver(model, num_slots=3)
    return [driver.forward(rows, sample) for rows, sample in STEPS]


def by_rank(given, tensor, pipeline, new_kernels=Kernels, **options):
    def body(collectives):
        return run(load_model(given, kernels=new_kernels(), collectives=collectives, **options))

    return World(tensor, pipeline).run(body)


@pytest.fixture
def exact_activations(monkeypatch):
    """Without a matrix unit, for which each rank rounds its own part of a row to 16 bits."""
    monkeypatch.setattr(matmul_plan, "has_int8_unit", lambda: False)


def assert_equal(given, tensor, pipeline, new_kernels=Kernels, tolerance=1e-5, **options):
    expected = run(load_model(given, kernels=new_kernels(), **options))
    first, *others = by_rank(given, tensor, pipeline, new_kernels, **options)
    for own, right in zip(first, expected, strict=True):
        torch.testing.assert_close(own, right, atol=tolerance, rtol=tolerance)
    for logits in others:
        assert [[*it.shape] for it in logits] == [[len(right), 0] for right in expected]


@pytest.mark.parametrize(("family", "tensor", "pipeline"), EVERY)
@pytest.mark.every(5)
def test_a_model_gives_the_logits_of_one_rank(family, tensor, pipeline):
    assert_equal(source(family), tensor, pipeline)


@pytest.mark.parametrize(
    ("family", "options", "tolerance"),
    [
        ("qwen3", {}, 1e-5),
        ("qwen3", {"dtype": "float64"}, 1e-12),
        ("qwen3", {"dtype": "bfloat16"}, 0.1),
        ("qwen3", {"weights_dtype": "int8"}, 1e-5),
        ("gpt2_odd", {"weights_dtype": "int8"}, 1e-5),  # matrices are transposed
    ],
)
@pytest.mark.every(2)
def test_compiled_kernels_do_so_too(family, options, tolerance, exact_activations):
    given, is_quantized = source(family), "weights_dtype" in options
    # else rows are rounded, many of them to 8 bits, by the largest of what a rank has
    kernels = functools.partial(CpuKernels, deterministic=is_quantized)
    assert_equal(given, 2, 2, kernels, tolerance, **options)
    if is_quantized:
        assert_equal(given, 2, 2, CpuKernels, 0.1, **options)


def test_each_rank_of_the_last_stage_may_have_the_logits():
    given = source("llama")

    def body(collectives):
        return run(load_model(given, kernels=Kernels(), collectives=collectives))

    first, second, *others = World(2, 2).run(body, replicates=True)
    assert all(torch.equal(own, other) for own, other in zip(first, second, strict=True))
    assert {it.shape[1] for logits in others for it in logits} == {0}
    assert {it.shape[1] for it in first} == {95}


def test_scales_of_an_8_bit_cache_are_shared_out():
    config, tensors = source("llama")
    tensors = dict(tensors)
    for layer in range(3):
        attention = f"model.layers.{layer}.self_attn"
        tensors[f"{attention}.k_scale"] = torch.tensor([0.02, 0.5]) + layer
        tensors[f"{attention}.v_scale"] = torch.tensor(0.3)
    given, options = (config, tensors), {"kv_cache_dtype": torch.float8_e4m3fn}

    def body(collectives):
        model = load_model(given, kernels=Kernels(), collectives=collectives, **options)
        first, count = model.spec.first_layer, model.spec.num_layers
        own = [model.weights.tensor(f"layers.{first + i}.cache_scales") for i in range(count)]
        return collectives.layout, torch.stack(own)

    for layout, scales in World(4, 2).run(body):
        head = layout.part // 2
        layers = [0.0, 1.0] if layout.is_first_stage else [2.0]
        expected = [[layer + (0.02, 0.5)[head], 0.3] for layer in layers]
        torch.testing.assert_close(scales, torch.tensor(expected))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_embeddings_of_a_prompt_replace_those_of_tokens_once(family):
    embeddings = torch.randn(3, 32, generator=torch.Generator().manual_seed(4))
    given = source(family)

    class Prompted:
        def __init__(self, model):
            self.spec, self._model = model.spec, model

        def forward(self, batch, pool):
            own = {"prompt_index": torch.tensor([0, 2, 3]), "prompt_embeddings": embeddings}
            return self._model.forward(replace(batch, **own), pool)

    def logits(collectives):
        model = load_model(given, kernels=Kernels(), collectives=collectives)
        return PagedDriver(Prompted(model), 1).forward([(0, [5, 6, 7, 8, 90])])

    torch.testing.assert_close(World(2, 2).run(logits)[0], logits(None), atol=1e-5, rtol=1e-5)


def test_a_deterministic_row_does_not_depend_on_the_others():
    given = source("llama")

    def body(collectives):
        kernels = CpuKernels(deterministic=True)
        model = load_model(given, kernels=kernels, collectives=collectives)
        many = PagedDriver(model, 40).forward([(i, [i, i + 1, 3]) for i in range(40)])
        return many[51:54], PagedDriver(model, 1).forward([(0, [17, 18, 3])])

    beside, alone = World(4, 1).run(body, deterministic=True)[0]
    assert torch.equal(beside, alone)


# Reading -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "qwen2_windows", "gpt2_odd"])
@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.every(5)
def test_weights_are_replaced_in_place_out_of_whole_tensors(family, quantized, exact_activations):
    config, old = source(family)
    _, new = checkpoint(random_model(CONFIGS[family] | ODD_VOCABULARY, seed=1))
    options = {"weights_dtype": "int8"} if quantized else {}

    def body(collectives):
        kernels = CpuKernels(deterministic=quantized)
        model = load_model((config, old), kernels=kernels, collectives=collectives, **options)
        model.weights.load(new)
        model.weights.load({n: t for n, t in new.items() if ".1." in n}, partial=True)
        assert model.weights.version == 3
        return run(model)

    kernels = CpuKernels(deterministic=quantized)  # else few rows are rounded, as above
    expected = run(load_model((config, new), kernels=kernels, **options))
    for own, right in zip(World(2, 2).run(body)[0], expected, strict=True):
        torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-5)


def test_groups_of_4_bits_are_replaced_in_place_on_each_rank(exact_activations):
    # each rank's columns begin with a group, so that its numbers are those of whole rows
    wide = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    (config, old), (_, new) = (
        checkpoint(random_model(CONFIGS["llama"] | ODD_VOCABULARY | wide, seed=seed))
        for seed in (0, 1)
    )
    kernels = functools.partial(CpuKernels, deterministic=True)

    def body(collectives):
        options = {"weights_dtype": "int4", "collectives": collectives}
        model = load_model((config, old), kernels=kernels(), **options)
        before = run(model)
        model.weights.load(new)
        model.weights.load({n: t for n, t in new.items() if ".1." in n}, partial=True)
        assert any(isinstance(it, Int4Matrix) for it in model.weights.matrices)
        return before, run(model)

    for of_rank, tensors in zip(World(2, 2).run(body)[0], (old, new), strict=True):
        expected = run(load_model((config, tensors), kernels=kernels(), weights_dtype="int4"))
        for own, right in zip(of_rank, expected, strict=True):
            torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-5)


class Reader:
    """Collectives of a rank that reads its weights and goes no further."""

    def __init__(self, *layout):
        self.layout = RankLayout(*layout)


@pytest.mark.parametrize("family", CONFIGS)
def test_ranks_have_each_parameter_once(family):
    given = source(family)
    whole = load_model(given, kernels=Kernels())
    ranks = [load_model(given, kernels=Kernels(), collectives=Reader(r, 2, 3)) for r in range(6)]
    for name in whole.weights:
        holders = [it.weights.tensor(name) for it in ranks if name in it.weights]
        module = name.split(".")[-2]
        stages = 1 + (module == "attention_norm" and name[7] != "0")
        stages += name == "embedding.weight" and whole.spec.tied_embeddings
        if "norm" in module or module == "positions":
            assert len(holders) == 2 * stages
            assert all(torch.equal(it, whole.weights.tensor(name)) for it in holders)
        elif name.endswith("bias") and module in ("out", "down"):
            assert len(holders) == 1 and torch.equal(holders[0], whole.weights.tensor(name))
        else:
            assert sum(it.numel() for it in holders) == stages * whole.weights.tensor(name).numel()
            total = sum(it.double().sum() for it in holders) / stages
            torch.testing.assert_close(total, whole.weights.tensor(name).double().sum())


@pytest.mark.parametrize("rank", range(4))
def test_what_is_wrong_with_a_checkpoint_is_found_on_each_rank(rank):
    config, tensors = source("llama_biased")
    reader = Reader(rank, 2, 2)

    def load(**changes):
        return load_model((config, tensors | changes), kernels=Kernels(), collectives=reader)

    load(**{"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    for layer in (0, 2):
        name = f"model.layers.{layer}.mlp.down_proj.weight"
        with pytest.raises(ConfigError, match=rf"{name} has shape \[32, 28\]"):
            load(**{name: tensors[name][:, :28]})
        with pytest.raises(ConfigError, match=f"tensors are unknown: {name}s"):
            load(**{f"{name}s": torch.zeros(1)})
        with pytest.raises(ConfigError, match=f"tensors are missing: {name}"):
            rest = {n: t for n, t in tensors.items() if n != name}
            load_model((config, rest), kernels=Kernels(), collectives=reader)


def test_a_twin_is_compared_with_what_a_rank_has():
    config, tensors = source("llama_biased")
    head = tensors["model.embed_tokens.weight"].clone()
    head[94] += 1
    given = config, tensors | {"lm_head.weight": head}
    load_model(given, kernels=Kernels(), collectives=Reader(0, 2, 1))
    with pytest.raises(ConfigError, match="lm_head.weight differs from embedding.weight"):
        load_model(given, kernels=Kernels(), collectives=Reader(1, 2, 1))


@pytest.mark.parametrize(
    ("changes", "layout", "text"),
    [
        ({}, (3, 1), "tensor_parallel_size = 3: must divide the 4 query heads"),
        ({}, (1, 4), "pipeline_parallel_size = 4 is more than the 3 layers"),
        (
            {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3},
            (2, 1),
            "tensor_parallel_size = 2: must divide the 3 KV heads or be a multiple",
        ),
        (
            {"intermediate_size": 57},
            (2, 1),
            "tensor_parallel_size = 2: must divide the 57 elements of the intermediate size",
        ),
        ({"vocab_size": 3}, (4, 1), "tensor_parallel_size = 4 is more than the vocabulary's 3 to"),
    ],
)
def test_what_cannot_be_shared_out_is_refused(changes, layout, text):
    with pytest.raises(ConfigError, match=f"^ParallelConfig.{text}"):
        load_model(source("llama", **changes), collectives=Reader(0, *layout))


# VmHWM, not getrusage: see test_models.py
_MEASURE = """
import re, sys
from gptmanager.kernels import CpuKernels
from gptmanager.environment.machine.memory import give_back
from gptmanager.models import load_model
from gptmanager.ranks.layout import RankLayout

class Reader:
    layout = RankLayout()

def kilobytes(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

tiny, *folders = sys.argv[1:]
load_model(tiny, kernels=CpuKernels(), collectives=Reader())
Reader.layout = RankLayout(3, 2, 2)
for folder in folders:
    give_back()
    open("/proc/self/clear_refs", "w").write("5")
    before = kilobytes("VmHWM")
    model = load_model(folder, kernels=CpuKernels(), collectives=Reader())
    print((kilobytes("VmHWM") - before) * 1024 / model.weights.nbytes)
    del model
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_rank_needs_memory_for_its_own_share_and_a_fifth_of_it(tmp_path):
    large = {"vocab_size": 20000, "tie_word_embeddings": True}
    llama = {"hidden_size": 768, "intermediate_size": 2048}
    random_model(CONFIGS["llama"]).save_pretrained(tmp_path / "tiny")
    save_large(CONFIGS["llama"] | large | llama, tmp_path / "llama")
    save_large(CONFIGS["gpt2"] | large | {"n_embd": 768}, tmp_path / "gpt2")
    folders = [tmp_path / name for name in ("tiny", "llama", "gpt2")]
    command = [sys.executable, "-c", _MEASURE, *folders]
    process = subprocess.run(command, check=True, capture_output=True, text=True)
    shares = [float(line) for line in process.stdout.split()]
    assert len(shares) == 2
    assert all(1.0 < share < 1.2 for share in shares), shares


# Adapters ----------------------------------------------------------------------------------


def adapter_limits(model):
    config = PeftCacheManagerConfig(
        optimal_adapter_size=4, max_adapter_size=8, host_cache_size=1 << 20
    )
    return adapter_sizes(config, model, 1 << 24)


def adapter_of(model, sizes, module_ids, rank):
    """A random one for these modules of each layer; a layer has a rank of its own."""
    generator = torch.Generator().manual_seed(rank)
    rows = [
        (module_id, layer, rank + layer)
        for layer in range(model.whole_spec.num_layers)
        for module_id in module_ids
    ]
    width = (rank + 2) * max(it.width for it in sizes.limits.modules.values())
    weights = torch.randn(len(rows), width, generator=generator) / 4
    return AdapterTensors(weights, torch.tensor(rows), sizes.limits)


def run_adapted(model, all_module_ids):
    """Logits of rows with adapters, and what a loop's accounts know of these."""
    sizes = adapter_limits(model)
    pool = AdapterPool(
        *(sizes.cache, 8, sizes.torch_dtype),
        modules=dict(sizes.modules),
        num_layers=sizes.num_layers,
        share=model.adapter_share,
    )
    known, page = [], 0
    for slot, module_ids in enumerate(all_module_ids):
        tensors = adapter_of(model, sizes, module_ids, rank=1 + 2 * slot)
        rows = [AdapterRow(*row) for row in tensors.row_sizes()]
        packing = pack(rows, sizes.cache.page_size, sizes.cache.first_layers)
        adapter = tensors.read()
        pages = range(page, page := page + len(packing.lengths))
        pool.put(pages, rows, packing, pool.kept(adapter))
        copies = zip(pages, pages, packing.lengths, strict=True)
        pool.copy(PageCopy(*copy) for copy in copies)
        pool.place(pages[0], rows, packing, pages)
        known.append((pages[0], rows, packing, adapter.digest))
    driver = PagedDriver(model, num_slots=3)
    slots = [known[0][0], -1, known[1][0]]
    driver.adapters = pool.step(torch.tensor(slots, dtype=torch.int32))
    logits = [driver.forward(rows, sample) for rows, sample in STEPS]
    return logits, (sizes, known)


@pytest.mark.parametrize(("tensor", "pipeline"), [(2, 2), (4, 1)])
@pytest.mark.parametrize(
    ("family", "module_ids"),
    [("llama", ((0, 4, 5, 6, 7), (1, 2, 3, 6))), ("gpt2", ((1, 2, 3, 4, 5, 6), (0, 5)))],
)
@pytest.mark.every(3)
def test_adapters_are_shared_out_as_their_matrices(family, module_ids, tensor, pipeline):
    given = source(family)

    def body(collectives):
        model = load_model(given, collectives=collectives)
        return run_adapted(model, module_ids)

    expected, (_, alone) = run_adapted(load_model(given), module_ids)
    ranks = World(tensor, pipeline).run(body)
    for own, right in zip(ranks[0][0], expected, strict=True):
        torch.testing.assert_close(own, right, atol=1e-5, rtol=1e-5)
    plain = run(load_model(given))
    assert not torch.allclose(plain[0][:5], expected[0][:5], atol=0.1)
    # what loops decide by is equal on all ranks, and what adapters are called that on one
    assert all(known == ranks[0][1] for _, known in ranks)
    assert [it[3] for it in ranks[0][1][1]] == [it[3] for it in alone]
    (sizes, ((_, rows, packing, _), _)), ((_, whole_rows, _, _), _) = ranks[0][1], alone
    assert sum(it.num_elements for it in rows) < sum(it.num_elements for it in whole_rows)
    # a stage has pages for its own layers alone
    assert len(sizes.cache.first_layers) == pipeline - 1
    all_layers = sum(it.num_elements for it in rows)
    assert sum(packing.lengths) < all_layers * 0.75 or pipeline == 1
    assert sum(packing.lengths) >= all_layers or pipeline > 1


def test_an_adapter_that_does_not_fit_is_refused_with_the_same_words_on_each_rank():
    def words(model):
        limits = adapter_limits(model).limits
        config = torch.tensor([[4, 2, 8]])  # the last layer's attention output
        with pytest.raises(AdapterError) as caught:
            AdapterTensors(torch.zeros(1, 511), config, limits)
        return str(caught.value)

    given = source("llama")
    alone = words(load_model(given))
    assert "needs at least 8 * 32 + 32 * 8 = 512" in alone
    for rank in range(4):
        assert words(load_model(given, collectives=Reader(rank, 2, 2))) == alone
