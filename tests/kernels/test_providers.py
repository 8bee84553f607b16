"""Providers of attention and matmuls over our kernels: their rows, and what they refuse."""

from __future__ import annotations

import logging
import sys

import numpy as np
import pytest
import torch
from attention_libraries import HostAttention
from kernel_cases import Sizes, new_pages, randn, textbook_attention

from gptmanager import KvCacheConfig, ModelType, OptionalParams
from gptmanager.assembly.attention_choice import choose
from gptmanager.assembly.attention_trial import StepLimits
from gptmanager.assembly.loading import load
from gptmanager.assembly.options import check_arguments, checked_optional_params
from gptmanager.callbacks import generate
from gptmanager.config import SchedulerConfig
from gptmanager.cuda.attention.provider_libraries import find_providers
from gptmanager.errors import CallbackError, ConfigError
from gptmanager.kernels import AttentionShape, CpuKernels, Kernels, PackedMatrix
from gptmanager.kernels.gemm.matmul_plan import packing_pays
from gptmanager.kernels.provided import ProvidedCpuKernels, ProvidedKernels, Served
from gptmanager.recorder import read_recording
from gptmanager.replay import replay
from gptmanager.testing import ScriptedModel

MIXED = [(5, 200), (63, 63), (1, 64), (1, 300)]
SHAPE = AttentionShape(4, 2, 32, 32**-0.5)
LIMITS = StepLimits(8, 64, 128, 16)


class OnReference(ProvidedKernels, Kernels):
    pass


class Stepwise:
    """Kernels whose attention is a step of its own, with so many context rows."""

    def __init__(self, kernels, num_context_rows):
        self.kernels, self.num_context_rows = kernels, num_context_rows

    def attention(self, q, pages, rows, shape, sinks=None):
        rows = rows._replace(num_context_rows=self.num_context_rows)
        rows = self.kernels.begin((shape,), rows, (), len(q), pages.values.shape[2])
        return self.kernels.attention(q, pages, rows, shape, sinks)


@pytest.mark.parametrize("kernels", [OnReference(), ProvidedCpuKernels()], ids=["torch", "cpu"])
@pytest.mark.parametrize("phases", ["context", "generation", "context generation"])
def test_each_phase_is_computed_by_its_provider(kernels, phases):
    sizes, host = Sizes(window=90), HostAttention()
    pages = new_pages(sizes, MIXED)
    shape = SHAPE._replace(window=90)
    kernels.use_attention({shape: Served(**dict.fromkeys(phases.split(), host))})
    found = pages.attend_all(Stepwise(kernels, 2))
    np.testing.assert_allclose(found, textbook_attention(pages), rtol=4e-6, atol=4e-6)
    assert [phase for phase, count in host.calls.items() if count] == phases.split()
    # without a step that has begun, and for other shapes, our own kernels compute
    pages.attend_all(kernels)
    pages.attend_all(Stepwise(kernels, 2), softcap=30.0)
    assert sum(host.calls.values()) == len(phases.split())


def test_a_provider_may_reuse_the_memory_of_its_last_result():
    host, kernels, memory = HostAttention(), OnReference(), torch.empty(68, 4, 32)

    def in_memory(method):
        def attend(queries, *given):
            return memory[: len(queries)].copy_(method(queries, *given))

        return attend

    host.attend_context = in_memory(host.attend_context)
    host.attend_generation = in_memory(host.attend_generation)
    pages = new_pages(Sizes(), MIXED)
    kernels.use_attention({SHAPE: Served(host, host)})
    found = pages.attend_all(Stepwise(kernels, 2))
    np.testing.assert_allclose(found, textbook_attention(pages), rtol=4e-6, atol=4e-6)


def test_rows_with_drafts_are_context_rows():
    host, kernels = HostAttention(), OnReference()
    pages = new_pages(Sizes(), [(5, 200), (1, 64), (3, 40)])
    kernels.use_attention({SHAPE: Served(host, host)})
    found = pages.attend_all(Stepwise(kernels, 1))
    np.testing.assert_allclose(found, textbook_attention(pages), rtol=4e-6, atol=4e-6)
    assert host.calls == {"context": 1, "generation": 0}


def test_a_result_of_another_shape_is_an_error():
    host, kernels = HostAttention(), OnReference()
    host.attend_context = lambda queries, *others: queries[:1]
    kernels.use_attention({SHAPE: Served(host, None)})
    with pytest.raises(
        CallbackError, match=r"returned the shape \(1, 4, 32\), expected \(68, 4, 32\)"
    ):
        new_pages(Sizes(), MIXED[:2]).attend_all(Stepwise(kernels, 2))


def test_steps_are_planned_as_captured_only_if_the_provider_is_capturable():
    class Planning(Kernels):
        def plan(self, *given):
            return (given[1],)

    class Both(ProvidedKernels, Planning):
        pass

    kernels, rows = Both(), (np.array([0, 1], np.int32), np.array([5], np.int32), 0)
    for capturable in (False, True):
        host = HostAttention(capturable=capturable)
        kernels.use_attention({SHAPE: Served(None, host)})
        assert len(kernels.plan((SHAPE,), *rows, fixed=1)) == capturable
        assert len(kernels.plan((SHAPE,), *rows)) == 1
        assert len(kernels.plan((SHAPE._replace(window=3),), *rows, fixed=1)) == 1
        assert not kernels.plan((SHAPE,), *rows[:2], 1, fixed=1)  # a step with contexts
        assert kernels.plan((SHAPE,), *rows[:2], 1)
    kernels.use_attention({SHAPE: Served(HostAttention(), None)})
    assert kernels.plan((SHAPE,), *rows, fixed=1)
    assert not kernels.plan((SHAPE,), *rows[:2], 1, fixed=1)
    kernels.use_linear(Doubling())
    assert not kernels.plan((SHAPE,), *rows, fixed=1)


# The choice -------------------------------------------------------------------------------------


def test_what_a_provider_refuses_is_logged_once_and_computed_by_our_kernels(caplog):
    class Narrow(HostAttention):
        def refusal(self, shape, dtype, tokens_per_block):
            super().refusal(shape, dtype, tokens_per_block)
            return "it has no windows" if shape.features else None

    host, kernels = Narrow(), OnReference()
    shapes = [SHAPE, SHAPE._replace(window=7), SHAPE._replace(window=9)]
    choose(kernels, (host,), shapes, torch.float32, LIMITS._replace(captures=True))
    assert host.asked == [(shape, torch.float32, 16) for shape in shapes]
    (record,) = caplog.records  # reference kernels are not captured, so nothing is lost
    assert record.getMessage() == (
        "our own kernels compute attention in place of the provider the host's, in 2 of 3 kinds of "
        "layers: it has no windows"
    )
    pages = new_pages(Sizes(window=9), MIXED)
    pages.attend_all(Stepwise(kernels, 2))
    assert sum(host.calls.values()) == 0
    new_pages(Sizes(), MIXED).attend_all(Stepwise(kernels, 2))
    assert host.calls == {"context": 1, "generation": 1}


class Capturing(OnReference):
    def plan(self, shapes, row_starts, kv_lengths, num_context_rows, fixed=0):
        return (row_starts,) if fixed else ()


class Scripted(HostAttention):
    """Takes so many seconds in each phase. `fails`: raises there."""

    def __init__(self, name, context, generation, **options):
        super().__init__(capturable=options.pop("capturable", True))
        self.name, self.figures, self.fails = (
            name,
            {"context": context, "generation": generation},
            "",
        )
        vars(self).update(options)

    def attend_context(self, *given):
        if self.fails == "context":
            raise RuntimeError("no such GPU")
        return super().attend_context(*given)


def timed(providers, own=(1.0, 1.0)):
    """A `seconds` that returns what the provider that has run says; own times by phase.

    The second result has the phase of each run of a provider, and whether it was captured.
    """
    order = []

    def seconds(run, captured):
        before = [dict(it.calls) for it in providers]
        run()
        for it, calls in zip(providers, before, strict=True):
            for phase, count in it.calls.items():
                if count > calls[phase]:
                    order.append((phase, captured))
                    return it.figures[phase]
        return own[captured]

    return seconds, order


@pytest.mark.parametrize(
    ("fast", "other", "expected"),
    [
        ({}, {}, ("fast", "fast")),
        ({"capturable": False}, {}, ("fast", "other")),
        ({"capturable": False}, {"capturable": False}, ("fast", None)),
        ({"fails": "context"}, {}, ("other", "fast")),
        ({"refused": "all"}, {}, ("other", "other")),
        ({"figures": {"context": 0.98, "generation": 0.98}}, {"refused": "all"}, (None, None)),
    ],
)
def test_auto_takes_the_fastest_of_each_phase(fast, other, expected, caplog, monkeypatch):
    monkeypatch.setattr("gptmanager.assembly.attention_trial._BEYOND_CACHES", 1 << 10)
    caplog.set_level(logging.INFO)
    providers = Scripted("fast", 0.5, 0.5, **fast), Scripted("other", 0.7, 0.7, **other)
    kernels, (seconds, order) = Capturing(), timed(providers)
    limits = LIMITS._replace(captures=True)
    choose(kernels, providers, [SHAPE], torch.float32, limits, seconds)
    served = kernels._served[SHAPE]
    assert tuple(it and it.name for it in served) == expected
    text = caplog.text
    names = [name or "own" for name in expected]
    assert f"attention: context by {names[0]}, generation by {names[1]}" in text
    assert ("no such GPU" in text) == ("fails" in fast)
    assert "without CUDA graphs" not in text
    assert all(captured == (phase == "generation") for phase, captured in order)
    assert any(captured for _, captured in order) or expected[1] is None


def test_a_manager_captures_only_what_its_limits_say(caplog, monkeypatch):
    """By default no step is captured, so a provider that is not capturable may compute all."""
    monkeypatch.setattr("gptmanager.assembly.attention_trial._BEYOND_CACHES", 1 << 10)
    provider = Scripted("fast", 0.5, 0.5, capturable=False)
    kernels, (seconds, order) = Capturing(), timed((provider,))
    choose(kernels, (provider,), [SHAPE], torch.float32, LIMITS, seconds)
    assert kernels._served[SHAPE] == Served(provider, provider)
    assert {captured for _, captured in order} == {False} and not caplog.records


def test_auto_without_enough_memory_stays_with_our_kernels(caplog):
    def seconds(run, captured):
        raise torch.OutOfMemoryError("no")

    kernels = OnReference()
    choose(kernels, (Scripted("x", 0.1, 0.1),), [SHAPE], torch.float32, LIMITS, seconds)
    assert kernels._served[SHAPE] == Served() and "not enough memory" in caplog.text


def test_auto_takes_what_all_ranks_take(monkeypatch):
    monkeypatch.setattr("gptmanager.assembly.attention_trial._BEYOND_CACHES", 1 << 10)
    own, kernels = (Scripted("x", 0.1, 0.1),), OnReference()
    given = kernels, own, [SHAPE], torch.float32, LIMITS, timed(own)[0]
    choose(*given, agree=lambda names: [names[0], "own"])
    assert kernels._served[SHAPE] == Served(own[0], None)


# Matmuls ----------------------------------------------------------------------------------------


class Doubling:
    """Returns twice the matmul, for wide weights."""

    def accepts(self, rows, columns, dtype):
        return rows >= 64 and dtype is torch.float32

    def __call__(self, x, weight, bias):
        return 2 * torch.nn.functional.linear(x, weight, bias)


def test_a_provider_of_matmuls_gets_plain_weights_that_it_accepts():
    kernels, x, weight, bias = ProvidedCpuKernels(), randn(3, 32), randn(64, 32), randn(64)
    assert isinstance(kernels.new_matrix(64, 32, torch.float32), PackedMatrix) is packing_pays()
    kernels.use_linear(Doubling())
    assert kernels.new_matrix(64, 32, torch.float32) is None
    assert isinstance(kernels.new_matrix(64, 32, torch.float32, "int8"), PackedMatrix)
    assert isinstance(kernels.new_matrix(48, 32, torch.float32), PackedMatrix) is packing_pays()
    own = CpuKernels()
    torch.testing.assert_close(kernels.linear(x, weight, bias), 2 * own.linear(x, weight, bias))
    torch.testing.assert_close(kernels.linear(x, weight[:8]), own.linear(x, weight[:8]))
    twice = own.silu_mul(2 * own.linear(x, weight, bias))
    torch.testing.assert_close(kernels.linear_silu_mul(x, weight, bias), twice)


# Managers ---------------------------------------------------------------------------------------


PROMPTS = ["17 + 25 =", "3 + 4 =", "Count: 1, 2"]


def answers(**options):
    cache = KvCacheConfig(max_tokens=256, tokens_per_block=16)
    params = OptionalParams(cache, max_batch_size=2, **options)
    return generate("examples/tiny_llama", PROMPTS, 4, optional_params=params)


def test_a_manager_on_the_cpu_with_providers_of_the_host(tmp_path):
    host, expected = HostAttention(), answers()
    assert answers(attention_provider=host, recording_path=tmp_path / "run") == expected
    assert len(host.asked) == 1 and all(host.calls.values())
    # a recording has no objects of the host
    assert replay(read_recording(tmp_path / "run")).divergence is None
    refusing = HostAttention("it is tired")
    assert answers(attention_provider=refusing) == expected and not any(refusing.calls.values())

    class Linear(Doubling):
        called = 0

        def __call__(self, x, weight, bias):
            self.called += 1
            return torch.nn.functional.linear(x, weight, bias)

    linear = Linear()
    assert answers(linear_provider=linear) == expected and linear.called


def test_providers_are_refused_with_a_model_object():
    model = ScriptedModel(lambda history: 1)
    for name, value in (("attention_provider", HostAttention()), ("linear_provider", Doubling())):
        params = OptionalParams(**{name: value})
        with pytest.raises(ConfigError, match=f"{name} = .* has no effect on a Model object"):
            load(model, params, CpuKernels(), torch.device("cpu"))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"attention_provider": "xformers"}, "must be one of ('own', 'flashinfer', 'flash_attn'"),
        ({"attention_provider": None}, "refusal, attend_generation, attend_context, got None"),
        ({"attention_provider": HostAttention}, "refusal, attend_generation, attend_context, got"),
        ({"attention_provider": "flashinfer"}, "the library needs device = 'cuda'"),
        ({"attention_provider": "flash_attn", "device": "emulator"}, "needs device = 'cuda'"),
        (
            {"attention_provider": "flashinfer", "device": "cuda", "deterministic": True},
            "OptionalParams.attention_provider = 'flashinfer' is refused with deterministic = True",
        ),
        ({"attention_provider": HostAttention(), "deterministic": True}, "refused with determ"),
        ({"linear_provider": Doubling(), "deterministic": True}, "OptionalParams.linear_provider"),
        ({"linear_provider": "cublas"}, "must be an object with accepts, __call__, got 'cublas'"),
    ],
)
def test_wrong_providers_are_refused(options, text):
    with pytest.raises(ConfigError) as error:
        checked_optional_params(OptionalParams(**options))
    assert text in str(error.value)


@pytest.mark.parametrize("options", [{}, {"device": "cuda", "deterministic": True}])
def test_auto_is_own_where_only_our_kernels_may_run(options):
    params = checked_optional_params(OptionalParams(attention_provider="auto", **options))
    assert params.attention_provider == "own"


def test_providers_are_refused_with_contiguous_caches():
    params = OptionalParams(attention_provider=HostAttention())
    with pytest.raises(ConfigError, match="attention_provider is refused with ModelType.V1"):
        check_arguments(ModelType.V1, 1, params, SchedulerConfig())


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("flashinfer", "pip install flashinfer-python"),
        ("flash_attn", "pip install flash-attn --no-build-isolation"),
    ],
)
def test_a_missing_library_is_an_error_with_the_command(name, command, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=command):
        find_providers(name, torch.device("cuda"))
    assert find_providers("auto", torch.device("cuda")) == ()
