"""Captured steps with contexts: which steps they are, and that padding changes no result."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import random_state
from devices import LLAMA, check_same, checkpoint, finals, prompt, set_token_sizes
from mixed_schedules import from_tokens
from step_rows import packed

from gptmanager import KvCacheConfig, ModelType, OptionalParams
from gptmanager.assembly.device_backend import DeviceBackend
from gptmanager.config import PromptLookup
from gptmanager.cuda.attention.context_attention import max_num_context_items, plan_context
from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.graphs import StepGraphs
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import EmulatedStream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.features import Features
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.executor.captured_steps import step_shapes
from gptmanager.executor.choice.device_chooser import DeviceChooser
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.packed_rows import StepShape, fitted, halves
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.kernels.attention.attention_arguments import AttentionShape
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import load_model

SHAPE = StepShape(tokens=12, long_rows=2, single_rows=3, samples=4)


@pytest.fixture
def replayed(monkeypatch):
    """The sizes of the steps that are replayed."""
    run, sizes = StepGraphs.run, []

    def spy(self, size, arrays):
        sizes.append(size)
        return run(self, size, arrays)

    monkeypatch.setattr(StepGraphs, "run", spy)
    return sizes


def test_rows_are_padded_after_the_contexts_and_at_the_end():
    padded = fitted(packed(1, (3, 7), (8, 9), (4, 5), samples=[1, 2]), SHAPE)
    assert padded.lines.tolist() == [0, 0, 1, 2, 0]
    assert padded.row_starts.tolist() == [0, 4, 4, 5, 6, 6] and padded.row_starts.dtype == np.int32
    assert padded.kv_lengths.tolist() == [7, 0, 9, 5, 0] and padded.kv_lengths.dtype == np.int32
    assert padded.positions.tolist() == [3, 4, 5, 6, 8, 4] + 6 * [0]
    assert padded.token_lines.tolist() == [0, 0, 0, 0, 1, 2] + 6 * [0]
    assert padded.sample_index.tolist() == [4, 5, 0, 0] and padded.sample_rows[:2].tolist() == [
        2,
        3,
    ]
    assert padded.num_context_rows == 2


def test_halves_of_a_batch_have_its_rows_and_samples():
    rows = packed(1, (3, 7), (8, 9), (4, 5), samples=[0, 2])
    (first, own), (second, others) = halves(rows)
    assert first.row_starts.tolist() == [0, 4] and second.row_starts.tolist() == [0, 1, 2]
    assert first.positions.tolist() == [3, 4, 5, 6] and second.positions.tolist() == [8, 4]
    assert (own.tolist(), others.tolist()) == ([0], [1])
    assert first.sample_index.tolist() == [3] and second.sample_index.tolist() == [1]
    assert first.sample_rows.tolist() == [0] and second.sample_rows.tolist() == [1]
    assert (first.num_context_rows, second.num_context_rows) == (1, 0)
    (first, own), (second, others) = halves(packed(1, (3, 8)))
    assert first.row_starts.tolist() == [0, 2] and second.row_starts.tolist() == [0, 3]
    assert first.kv_lengths.tolist() == [5] and second.kv_lengths.tolist() == [8]
    assert own.tolist() == [] and others.tolist() == [0]
    assert halves(packed(0, (3, 4))) == ()


def test_which_rows_fit():
    one = (5, 6)
    assert fitted(packed(1, (0, 9), one, one, one), SHAPE)
    assert fitted(packed(2, (0, 9), one, one), SHAPE)  # a context of one token
    assert fitted(packed(0, (4, 8), one), SHAPE)  # a draft: as a context
    late = fitted(packed(0, one, (4, 8), one), SHAPE)
    assert late.row_starts.tolist() == [0, 1, 5, 6, 6, 6], "and so is what is before it"
    assert not fitted(packed(1, (0, 10), one, one, one), SHAPE)  # tokens
    assert not fitted(packed(3, one, one, one), SHAPE)  # contexts
    assert not fitted(packed(0, one, one, (4, 8)), SHAPE)
    assert not fitted(packed(0, one, one, one, one), SHAPE)  # other rows
    twice = packed(1, (0, 4), one, one, samples=[0, 1, 1, 2, 2])
    assert not fitted(twice, SHAPE)


def test_items_of_contexts_fit():
    """For any lengths, and no place is needless: all rows of one tile and a token more."""
    chance = np.random.default_rng(0)
    for group in (1, 3, 8, 16):
        shape = AttentionShape(2 * group, 2, 64, 0.1)
        most_found = 0
        for _ in range(200):
            num_rows, num_tokens = int(chance.integers(1, 5)), int(chance.integers(1, 700))
            cuts = np.sort(chance.integers(0, num_tokens + 1, num_rows - 1))
            lengths = np.diff(np.concatenate(([0], cuts, [num_tokens]))).astype(np.int32)
            items = plan_context(lengths, lengths + 3, shape)
            most = max_num_context_items(num_rows, num_tokens, shape)
            assert len(items) <= most
            most_found = max(most_found, len(items) / most)
        assert most_found == 1


def test_sizes_that_are_captured():
    assert step_shapes((8, 64), 24) == (StepShape(8, 16, 8, 8), StepShape(64, 16, 24, 24))
    assert step_shapes((64,), 4) == (StepShape(64, 4, 4, 4),)


def test_switches(toolchain, monkeypatch):
    set_token_sizes(monkeypatch, 8, 16)
    model = load_model((LLAMA, checkpoint(tuple(sorted(LLAMA.items(), key=str)))))

    def shapes(words="", **params):
        stream = EmulatedStream(EmulatorLauncher(features=Features.parse(words)))
        return DeviceBackend(stream, OptionalParams(**params))._shapes(model, 3)

    assert shapes() == step_shapes((8, 16), 3) and shapes(max_num_tokens=8) == shapes()[:1]
    assert shapes("no-graphs") == shapes("no-mixed-graphs") == shapes(cuda_graphs=False) == ()


# A runner: the logits of the same steps, captured and launched ---------------------------------

STEPS = (
    packed(2, (0, 9), (0, 2), samples=[1]),  # the first context has a chunk only
    packed(1, (9, 11), (2, 3)),
    packed(1, (11, 12), (3, 4), samples=[1]),  # a step of one token
    packed(0, (12, 15), (4, 5)),  # with drafts
    packed(1, (15, 23), samples=[]),  # no sample
    packed(1, (23, 25), (5, 6))._replace(samples_prompts=True),  # launched
    packed(0, (25, 26), (6, 7)),
)


def logits_of(shapes, kernels, **options):
    stream = EmulatedStream(kernels._launcher)
    model = load_model(
        (LLAMA, checkpoint(tuple(sorted(LLAMA.items(), key=str)))),
        kernels=kernels,
        device=stream.device,
        **options,
    )
    tables = DeviceTables(2, 32, 4, stream.device)
    pool = KvPool(model.spec.pages, 8, 8, token_major=True, dtype=model.spec.dtype)
    for stack in pool.stacks:
        for pages in stack.tokens:
            pages.fill_(torch.nan)
    copies = Uploads(stream), Downloads(stream, 16)
    sizes = {"graph_sizes": (2,), "shapes": shapes}
    runner = DeviceRunner(model, pool, tables, stream, *copies, **sizes)
    for line in range(2):
        tables.write_blocks(line, 0, [5 - line, 2 + line, 7 - line, line])
        tables.write_tokens(line, 0, prompt(3 + line, 30))
    with torch.inference_mode():
        return torch.cat([runner.run(step).logits.clone() for step in STEPS])


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("deterministic", "options"),
    [
        (True, {}),
        (False, {"attention_window": 6, "sink": 2}),
        (False, {"dtype": "bfloat16", "weights_dtype": "int8"}),
    ],
    ids=["deterministic", "window", "int8"],
)
def test_padding_changes_nothing(toolchain, replayed, deterministic, options):
    has_matmuls = "weights_dtype" in options
    kernels = CudaKernels(EmulatorLauncher(has_matmuls=has_matmuls), deterministic)
    launched = logits_of((), kernels, **options)
    assert replayed == [2]
    replayed.clear()
    shapes = StepShape(4, 2, 2, 2), SHAPE
    captured = logits_of(shapes, kernels, **options)
    assert replayed == [12, 4, 4, 4, 12, 2]
    if deterministic:
        assert torch.equal(captured, launched)
    else:
        torch.testing.assert_close(captured, launched, atol=1e-5, rtol=1e-5)


# Managers -----------------------------------------------------------------------------------------


def test_requests_of_all_kinds(device, replayed, monkeypatch):
    """They start one after the other, beside those that generate."""
    set_token_sizes(monkeypatch, 24)
    options = [
        {"repetition_penalty": 1.4},
        {"temperature": 0.8, "random_seed": 3},
        {"return_log_probs": True},
        {"return_context_logits": True, "min_length": 4, "end_id": 3},
        {"return_generation_logits": True, "no_repeat_ngram_size": 2},
        {},
    ]

    def requests():
        return [
            from_tokens(i, prompt(i, 4 + 3 * i), 2 + 2 * (i % 3), **own)
            for i, own in enumerate(options)
        ]

    check_same(device, requests, run_ahead=1, max_batch_size=3)
    assert replayed.count(24) > 2 and {2, 4} <= {*replayed}


def test_chunks_and_passes_of_one_step(device, replayed, monkeypatch):
    """Both passes of a step write their logits to the same memory."""
    set_token_sizes(monkeypatch, 16)

    def requests():
        return [from_tokens(i, prompt(i, 19 - 4 * i), 2 + i) for i in range(4)]

    options = {"enable_chunked_context": True, "max_num_tokens": 18, "max_batch_size": 2}
    check_same(device, requests, model_type=ModelType.INFLIGHT_BATCHING, **options)
    assert replayed.count(16) > 2


def test_drafts(device, replayed, monkeypatch):
    """The choice for a row with drafts may depend on their order, so no captured step makes it."""
    set_token_sizes(monkeypatch, 16)
    download, drafts = DeviceChooser._download, []

    def spy(self, rows, chosen):
        drafts.extend(rows.drafts)
        return download(self, rows, chosen)

    monkeypatch.setattr(DeviceChooser, "_download", spy)

    def requests():
        return [from_tokens(i, prompt(4, 13 + i), 12) for i in range(2)]

    norm = "model.norm.weight"  # zeros: all logits are 0, all tokens and drafts are 0
    source = LLAMA, {**random_state(LLAMA), norm: torch.zeros(LLAMA["hidden_size"])}
    lookup = PromptLookup(max_draft_tokens=3)
    check_same(
        device, requests, source=source, speculative_decoding_config=lookup, max_batch_size=8
    )
    assert 16 in replayed and not drafts


def test_virtual_tokens_are_launched(device, replayed, monkeypatch):
    set_token_sizes(monkeypatch, 16)
    table = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)

    def requests():
        own = {"prompt_embedding_table": table, "prompt_vocab_size": 2}
        return [from_tokens(1, [96, 97, 4], 3, **own)]

    check_same(device, requests)
    assert 16 not in replayed


def test_deterministic_outputs_are_the_same_bits(device, replayed, monkeypatch):
    set_token_sizes(monkeypatch, 16)
    cache = KvCacheConfig(max_tokens=256, tokens_per_block=16)
    found = []
    for options in ({"cuda_graphs": False}, {"enable_chunked_context": True, "max_num_tokens": 16}):
        requests = [
            from_tokens(i, prompt(i, 5 + 9 * i), 3, return_log_probs=True) for i in range(3)
        ]
        found.append(finals(requests, device, deterministic=True, cache=cache, **options))
    assert replayed.count(16) > 1
    for one, other in zip(*found, strict=True):
        for name in ("output_ids", "output_log_probs"):
            assert torch.equal(one.tensors[name], other.tensors[name])
