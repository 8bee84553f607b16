"""Providers that break their contract: the error names what was wrong, and nothing else ends."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attention_libraries import HostAttention
from kernel_cases import randn
from shorthand import params, request

from gptmanager import GptManager, ModelType
from gptmanager.errors import CallbackError
from gptmanager.kernels import AttentionShape, Kernels
from gptmanager.kernels.attention.attention_arguments import Pages, RowLengths, RowSpans
from gptmanager.kernels.gemm.matmul_plan import packing_pays
from gptmanager.kernels.provided import ProvidedCpuKernels, ProvidedKernels, Served
from gptmanager.testing import ContractChecker, RecordingCallbacks

SHAPE = AttentionShape(4, 2, 32, 32**-0.5)


class Linear:
    """Multiplies by all weights. `change` is applied to the result, `answer` is what it accepts."""

    capturable = True

    def __init__(self, change=lambda result: result, answer=lambda *kind: True):
        self.change, self.accepts = change, answer

    def __call__(self, x, weight, bias):
        return self.change(torch.nn.functional.linear(x, weight, bias))


class Attention(HostAttention):
    """`change` is applied to the results of `phase`."""

    def __init__(self, change, phase):
        super().__init__()
        method = f"attend_{phase}"
        attend = getattr(self, method)
        setattr(self, method, lambda *given: change(attend(*given)))


def fail(*given):
    raise RuntimeError("the host is tired")


def build(**providers):
    """A manager with three requests, of which the third comes later, and its host."""
    host = RecordingCallbacks(request(number, [5, 9, 11 + number], 4) for number in range(3))
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    manager = GptManager(
        "examples/tiny_llama",
        ModelType.INFLIGHT_FUSED_BATCHING,
        get_inference_requests_cb=checker.get_inference_requests,
        send_response_cb=checker.send_response,
        optional_params=params(max_batch_size=2, **providers),
    )
    return manager, host, checker


FAULTS = [
    (fail, "raised RuntimeError: the host is tired"),
    (lambda result: None, "returned a value of type NoneType, expected a tensor"),
    (lambda result: result.numpy(), "returned a value of type ndarray, expected a tensor"),
    (lambda result: (result, None), "returned a value of type tuple, expected a tensor"),
    (lambda result: result[1:], "returned the shape ("),
    (lambda result: result.int(), "returned the dtype torch.int32, expected torch.float32"),
    (lambda result: result.bool(), "returned the dtype torch.bool, expected torch.float32"),
    (lambda result: result + 0j, "returned the dtype torch.complex64, expected torch.float32"),
    (lambda result: result.to("meta"), "returned the device meta, expected cpu"),
    (lambda result: result.to_sparse(), "returned the layout torch.sparse_coo, expected torch.st"),
]


@pytest.mark.parametrize(("change", "problem"), FAULTS)
@pytest.mark.parametrize("what", ["context", "generation", "linear"])
@pytest.mark.every(7)
def test_each_request_gets_an_error_that_names_the_provider(what, change, problem):
    if what == "linear":
        providers = {"linear_provider": Linear(change)}
        begin = "__call__ of the provider Linear"
    else:
        providers = {"attention_provider": Attention(change, what)}
        begin = f"attend_{what} of the provider the host's"
    manager, host, checker = build(max_step_failures=10, dtype="float32", **providers)
    with manager:
        assert manager.wait_idle(20) and manager.audit().ok
        for request_id in range(3):
            text = host.final(request_id).error
            assert text.startswith("StepError: ") and f"CallbackError: {begin} {problem}" in text
    checker.check(manager)


@pytest.mark.parametrize("what", ["context", "linear"])
def test_an_error_of_logits_names_the_provider(what):
    def spoil(result):
        return result.clone().fill_(torch.nan)

    linear, attention = Linear(), Attention(spoil, "context")
    if what == "linear":
        linear, attention = Linear(spoil), "own"
    manager, host, checker = build(linear_provider=linear, attention_provider=attention)
    names = "Linear" if what == "linear" else f"{attention.name}, Linear"
    with manager:
        assert manager.wait_idle(20) and manager.audit().ok
    for request_id in range(3):
        text = host.final(request_id).error
        assert text.startswith("LogitsError: the logits of generated token 1")
        assert text.endswith(f"; providers that computed attention or matmuls: {names}")
    checker.check(manager)


@pytest.mark.parametrize("change", [lambda it: it.double(), lambda it: it.mT.contiguous().mT])
def test_other_floats_and_other_strides_are_accepted(change):
    answers = []
    for given in ({}, {"linear_provider": Linear(change)}):
        provider = Attention(change, "context") if given else "own"
        manager, host, _ = build(dtype="float32", attention_provider=provider, **given)
        with manager:
            assert manager.wait_idle(20)
        answers.append([host.final(it).tensors["output_ids"].tolist() for it in range(3)])
    assert answers[0] == answers[1]


def test_ops_that_change_a_result_in_place_accept_other_strides():
    """Norms of heads (as in OLMo 2) and adapters on the CPU, and all ops on devices."""
    kernels = ProvidedCpuKernels()
    kernels.use_linear(Linear(lambda it: it.mT.contiguous().mT))
    x, weight = randn(3, 32), randn(64, 32)
    found, expected = kernels.linear(x, weight), torch.nn.functional.linear(x, weight)
    kind = {"centered": False, "plus_one": False}
    for own, result in ((kernels, found), (Kernels(), expected)):
        own.norm_heads(result, range(64), 16, torch.ones(64), 1e-6, **kind)
    torch.testing.assert_close(found, expected)


def raises(option, provider, text):
    with pytest.raises(CallbackError, match=text):
        build(**{option: provider})


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (fail, "raised RuntimeError: the host is tired"),
        (lambda *given: False, "returned False, expected None or a string"),
        (lambda *given: ["no"], r"returned \['no'\], expected None or a string"),
    ],
)
def test_a_wrong_refusal_ends_the_start(answer, problem):
    provider = HostAttention()
    provider.refusal = answer
    raises("attention_provider", provider, f"^refusal of the provider the host's {problem}")


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (fail, "raised RuntimeError: the host is tired"),  # which is not a lack of memory
        (lambda *kind: None, "returned None, expected True or False"),
        (lambda *kind: torch.ones(2), r"returned tensor\(\[1., 1.\]\), expected True or False"),
    ],
)
def test_a_wrong_answer_about_weights_ends_the_start(answer, problem):
    raises("linear_provider", Linear(answer=answer), f"^accepts of the provider Linear {problem}")


def test_a_provider_is_asked_once_about_each_kind_of_weights():
    asked = []
    linear = Linear(answer=lambda *kind: asked.append(kind) or np.bool_(len(asked) == 1))
    kernels = ProvidedCpuKernels()
    kernels.use_linear(linear)
    for _ in range(3):
        assert kernels.new_matrix(64, 32, torch.float32) is None
        assert (kernels.new_matrix(64, 48, torch.float32) is not None) is packing_pays()
    assert asked == [(64, 32, torch.float32), (64, 48, torch.float32)]


def test_an_error_of_memory_stays_one():
    """So that the executor runs the step in parts."""

    def lack(result):
        raise torch.OutOfMemoryError("no memory")

    kernels = ProvidedCpuKernels()
    kernels.use_linear(Linear(lack))
    with pytest.raises(torch.OutOfMemoryError):
        kernels.linear(randn(3, 32), randn(64, 32))


class Empty(HostAttention):
    """As a torch module without children: its truth is False."""

    def __len__(self):
        return 0


class Elementwise(HostAttention):
    """As a tensor: no comparison with it is True or False."""

    def __eq__(self, other):
        return torch.ones(2)

    __hash__ = None


@pytest.mark.parametrize("kind", [Empty, Elementwise])
def test_only_the_identity_of_a_provider_counts(kind):
    provider = kind()
    manager, _, _ = build(attention_provider=provider)
    with manager:
        assert manager.wait_idle(20)
    assert all(provider.calls.values())


class OnReference(ProvidedKernels, Kernels):
    pass


@pytest.mark.parametrize("is_captured", [False, True])
def test_rows_that_a_provider_overwrites_are_its_own(is_captured):
    """Our kernels would read and write out of bounds."""
    starts, lengths = (torch.tensor(it, dtype=torch.int32) for it in ([0, 1, 2], [20, 7]))
    on_cpu = None if is_captured else RowLengths(starts.numpy().copy(), lengths.numpy().copy())
    tables = torch.tensor([[1, 0], [2, 0]], dtype=torch.int32)
    slots = torch.arange(2, dtype=torch.int32)
    before = [it.clone() for it in (starts, lengths, tables)]
    kernels, provider = OnReference(), HostAttention()

    def spoil(queries, pages, rows, shape, sinks):
        for own in (rows.query_starts, rows.kv_lengths, rows.block_tables, *(rows.lengths or ())):
            own[...] = 99
        return torch.zeros_like(queries)

    provider.attend_generation = spoil
    kernels.use_attention({SHAPE: Served(None, provider)})
    spans = RowSpans(starts, lengths, slots, tables, 0, on_cpu)
    plan = (slots,) if is_captured else ()
    spans = kernels.begin((SHAPE,), spans, plan, 2, 16)
    pages = Pages(randn(3, 2, 16, 32).mT, randn(3, 2, 16, 32))
    kernels.attention(randn(2, 4, 32), pages, spans, SHAPE)
    assert all(map(torch.equal, (starts, lengths, tables), before))
    if on_cpu is not None:
        assert all(map(np.array_equal, on_cpu, (it.numpy() for it in before)))
