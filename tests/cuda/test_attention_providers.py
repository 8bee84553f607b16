"""Attention of other libraries, as modules in torch, and managers on the emulator with them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attention_libraries import FlashAttn, FlashInfer, HostAttention
from devices import finals, prompt, there_is
from mixed_schedules import from_tokens
from paged_rows import PagedRows

from gptmanager import KvCacheConfig
from gptmanager.cuda.attention import flash_attention
from gptmanager.cuda.attention.flash_attention import FlashAttention
from gptmanager.cuda.attention.flashinfer_attention import FlashInferAttention
from gptmanager.cuda.device.graphs import StepGraphs
from gptmanager.cuda.device.streams import EmulatedStream
from gptmanager.cuda.kernels import StepPlan
from gptmanager.kernels import Kernels
from gptmanager.kernels.provided import ProvidedKernels, Served

CPU = SimpleNamespace(tensor=lambda values: values)
ROWS = [(5, 300), (40, 40), (1, 1), (1, 257), (1, 256)]  # two of a context


def flashinfer():
    return FlashInferAttention(FlashInfer, torch.device("cpu"))


def flash_attn():
    return FlashAttention(FlashAttn())


class OnReference(ProvidedKernels, Kernels):
    pass


@pytest.mark.parametrize("provider", [flashinfer, flash_attn])
@pytest.mark.parametrize("options", [{}, {"window": 100}, {"softcap": 5.0}])
def test_a_library_gets_our_pages(provider, options):
    block = 256 if provider is flash_attn else 16
    rows, kernels, own = PagedRows(ROWS, 6, 2, 64, block), OnReference(), provider()
    shape = rows.shape(0.09, **options)
    assert own.refusal(shape, rows.dtype, block) is None
    kernels.use_attention({shape: Served(own, own)})
    expected = rows.textbook(0.09, **options)
    rows.block_tables.clamp_(min=0)  # as in the tables of an executor
    for _ in range(2):  # steps reuse what a library keeps
        spans = rows.spans_on(CPU)._replace(num_context_rows=2)
        spans = kernels.begin((shape,), spans, (), len(rows.queries), block)
        for _ in range(2):  # layers share the plan of a step
            found = kernels.attention(rows.queries, rows.pages_on(CPU), spans, shape)
            torch.testing.assert_close(
                found.view(expected.shape).double(), expected, rtol=1.6e-2, atol=1.6e-2
            )


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("num_drafts", [0, 1, 2])
def test_generation_rows_are_contexts_if_one_of_them_has_drafts(num_drafts, place):
    lengths = [(1, 70), (1, 40), (1, 1)]
    lengths[place] = 1 + num_drafts, 50
    rows, kernels, own = PagedRows(lengths, 6, 2, 64), OnReference(), HostAttention()
    shape = rows.shape(0.09)
    kernels.use_attention({shape: Served(own, own)})
    spans = rows.spans_on(CPU)._replace(num_context_rows=0)
    spans = kernels.begin((shape,), spans, (), len(rows.queries), 16)
    found = kernels.attention(rows.queries, rows.pages_on(CPU), spans, shape)
    expected = rows.textbook(0.09)
    torch.testing.assert_close(
        found.view(expected.shape).double(), expected, rtol=1.6e-2, atol=1.6e-2
    )
    assert own.calls == {"context": int(num_drafts > 0), "generation": int(num_drafts == 0)}


def test_two_shapes_of_a_step_have_plans_of_their_own():
    rows, kernels, own = PagedRows(ROWS, 6, 2, 64), OnReference(), flashinfer()
    kinds = {}, {"window": 20}
    shapes = [rows.shape(0.09, **it) for it in kinds]
    kernels.use_attention(dict.fromkeys(shapes, Served(own, own)))
    spans = rows.spans_on(CPU)._replace(num_context_rows=2)
    spans = kernels.begin(shapes, spans, (), len(rows.queries), 16)
    for shape, options in [*zip(shapes, kinds, strict=True)] * 2:
        found = kernels.attention(rows.queries, rows.pages_on(CPU), spans, shape)
        expected = rows.textbook(0.09, **options)
        torch.testing.assert_close(
            found.view(expected.shape).double(), expected, rtol=1.6e-2, atol=1.6e-2
        )


@pytest.mark.parametrize("provider", [flashinfer, flash_attn])
@pytest.mark.parametrize(
    ("changes", "dtype", "block", "reason"),
    [
        ({}, torch.float32, 256, "must be torch.float16 or torch.bfloat16"),
        ({"sink": 4, "window": 64}, torch.bfloat16, 256, "no attention with sink"),
        ({"sinks": True, "fp8": True}, torch.bfloat16, 256, "no attention with fp8, sinks"),
        ({"is_once": True}, torch.bfloat16, 256, "is_once"),
        ({"chunked": True, "window": 64}, torch.bfloat16, 256, "chunked"),
        ({"head_dim": 300}, torch.bfloat16, 256, "head_dim = 300 must be"),
    ],
)
def test_a_library_refuses_what_it_does_not_know(provider, changes, dtype, block, reason):
    shape = PagedRows([(1, 1)], 6, 2, 64).shape(0.1)._replace(**changes)
    assert reason in provider().refusal(shape, dtype, block)


def test_a_plan_is_divided_between_the_phases():
    plan = StepPlan(None, "context", "generation", {})
    assert plan.part(0) == plan._replace(generation=None)
    assert plan.part(2) == plan._replace(context=None)
    for one in (plan._replace(context=None), plan._replace(generation=None)):
        assert one.part(0) is one


def test_flash_attn_refuses_small_blocks():
    shape = PagedRows([(1, 1)], 6, 2, 64).shape(0.1)
    assert "tokens_per_block = 64 must be a mult" in flash_attn().refusal(shape, torch.float16, 64)


def is_used(provider):
    return getattr(provider, "refused", None) is None


SMALL = {"cache": KvCacheConfig(max_tokens=1024, tokens_per_block=256), "max_batch_size": 2}


def several():
    return [from_tokens(i, prompt(i, 5 + 9 * i), 2 + i) for i in range(1, 3)]


@pytest.fixture(scope="module")
def expected():
    return [it.tensors["output_ids"].tolist() for it in finals(several(), "cpu", **SMALL)]


@pytest.mark.every(2)
@pytest.mark.parametrize(
    ("new", "captures"),
    [
        (lambda: HostAttention(capturable=True), True),
        (lambda: HostAttention(), False),
        (lambda: HostAttention("it is tired"), True),
        (flash_attn, True),
        (flashinfer, False),
    ],
    ids=["capturable", "not capturable", "refusing", "flash_attn", "flashinfer"],
)
def test_managers_on_the_emulator(new, captures, expected, monkeypatch, caplog):
    recorded, record = [], StepGraphs.record
    monkeypatch.setattr(StepGraphs, "record", lambda *given: recorded.append(record(*given)))
    # so that both compute the same numbers, and choose the same tokens
    monkeypatch.setattr(flash_attention, "NARROW", (torch.float32,))
    # steps with contexts would be captured, too, if no provider computed attention
    monkeypatch.setattr(EmulatedStream, "token_sizes", (32,) if is_used(new()) else ())
    own = new()
    found = finals(several(), there_is("emulator"), attention_provider=own, **SMALL)
    assert [it.error for it in found] == [""] * len(found)
    assert [it.tensors["output_ids"].tolist() for it in found] == expected
    assert bool(recorded) is captures
    assert ("without CUDA graphs: the attention provider" in caplog.text) is not captures
    if isinstance(own, HostAttention):
        assert all(own.calls.values()) is (own.refused is None)
