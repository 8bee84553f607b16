"""Mixtures of experts on the emulator or a GPU, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from kernel_values import DTYPES, close, exact, on, randn, rounded

from gptmanager.cuda import moe
from gptmanager.cuda.gemm.byte_rows import Fp8Rows, Int8Rows
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.kernels.activations.activation_kinds import activate, activate_gated
from gptmanager.kernels.experts import routing as reference
from gptmanager.kernels.experts.mixture import ExpertMatrices
from gptmanager.kernels.experts.routing import Routing

pytestmark = pytest.mark.every(3)

ROUTINGS = (
    Routing(1),
    Routing(2, "softmax", renormalize=True, factor=1.5),
    Routing(4, "softmax_of_best"),
    Routing(2, "sigmoid_of_best"),
    Routing(3, "sigmoid", renormalize=True, groups=4, top_groups=2, sum_eps=0.5),
    Routing(3, "sigmoid", factor=2.5, groups=4, top_groups=1, group_score="best"),
    Routing(2, "softmax", groups=12, top_groups=5),
)


@pytest.mark.every(1)  # each score and each way to choose groups has a branch of its own
@pytest.mark.parametrize("corrects", [False, True], ids=["", "correction"])
@pytest.mark.parametrize("routing", ROUTINGS, ids=str)
def test_choices_are_those_of_the_reference(machine, routing, corrects):
    for num_experts in (12, 96):
        logits = 3 * randn(9, num_experts, seed=num_experts)
        logits[1, 5] = torch.nan  # chosen first, so that the output shows it
        correction = randn(num_experts, seed=1) if corrects else None
        given = machine.tensor(logits), routing, correction
        if corrects:
            given = (*given[:2], machine.tensor(correction))
        chosen, weights = moe.choose_experts(machine.launcher, *given)
        wide = correction if correction is None else correction.double()
        experts, expected = reference.choose_experts(logits.double(), routing, wide)
        assert torch.equal(chosen.cpu().long(), experts)
        close(weights, expected, 1e-6)


def test_choices_of_nan_logits_are_different_experts(machine):
    """If scores are equal, the first expert is chosen, and no expert is chosen twice."""
    logits = torch.zeros(4, 40)
    logits[1] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7], logits[3, 33] = torch.inf, 5.0
    chosen, _ = moe.choose_experts(machine.launcher, machine.tensor(logits), Routing(3), None)
    assert chosen[:3].tolist() == [[0, 1, 2]] * 3
    assert len({*chosen[3].tolist()}) == 3


@pytest.mark.parametrize(("first", "count"), [(0, 6), (2, 3), (5, 1)])
@pytest.mark.parametrize("num_tokens", [1, 40, 700])
def test_slots_are_sorted_by_expert(machine, num_tokens, first, count):
    generator = torch.Generator().manual_seed(num_tokens)
    chosen = torch.randint(0, 6, (num_tokens, 3), generator=generator).int()
    chosen[chosen == 3] = 2  # which nobody chooses
    slots = moe.sort_slots(machine.launcher, machine.tensor(chosen), first, count)
    order, tiles, found = slots.sorted.tolist(), slots.tiles.tolist(), []
    for expert, start, stop in tiles:
        assert (expert == -1) == (stop == start)
        assert stop - start <= slots.rows
        own = order[start:stop]
        assert {int(chosen.flatten()[slot]) - first for slot in own} <= {expert}
        found += own
    is_here = (chosen >= first) & (chosen < first + count)
    assert sorted(found) == is_here.flatten().nonzero().flatten().tolist()
    assert slots.rows == (128 if 3 * num_tokens >= 64 * count else 32)


def matrices(count, hidden, width, dtype, activation, gated, biases, first=0, kind=None):
    up = width * (2 if gated else 1)
    own = [randn(count * up, hidden, dtype=dtype, seed=1), randn(count * up, dtype=dtype, seed=2)]
    own += [randn(count * hidden, width, dtype=dtype, seed=3)]
    own += [randn(count * hidden, dtype=dtype, seed=4)]
    own = [0.3 * it for it in own]
    if not biases:
        own[1] = own[3] = None
    if kind is not None:
        own[0], own[2] = rounded(own[0], kind), rounded(own[2], kind)
    return ExpertMatrices(*own, activation, gated, first, count)


def mixed(x, logits, routing, experts):
    """In float64, token by token."""
    chosen, weights = reference.choose_experts(logits.double(), routing, None)
    out = torch.zeros(x.shape, dtype=torch.float64)
    up, up_bias, down, down_bias = (
        None if it is None else exact(it).chunk(experts.count) for it in experts[:4]
    )
    for token, (own, factors) in enumerate(zip(chosen.tolist(), weights, strict=True)):
        for number, factor in zip(own, factors, strict=True):
            expert = number - experts.first
            if not 0 <= expert < experts.count:
                continue
            hidden = up[expert] @ x[token].double()
            if up_bias is not None:
                hidden = hidden + up_bias[expert]
            if experts.gated:
                hidden = activate_gated(*hidden.chunk(2), experts.activation)
            else:
                hidden = activate(hidden, experts.activation)
            # as results are handed on
            output = down[expert] @ hidden.to(x.dtype).double()
            if down_bias is not None:
                output = output + down_bias[expert]
            out[token] += factor * output.to(x.dtype).double()
    return out


def check(machine, x, logits, routing, experts):
    own = ExpertMatrices(*[on(machine, it) for it in experts[:4]], *experts[4:])
    kernels = CudaKernels(machine.launcher)
    out = kernels.experts(machine.tensor(x), machine.tensor(logits), None, routing, own)
    assert out.dtype is x.dtype
    expected = mixed(x, logits, routing, experts)
    bound = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[x.dtype]
    assert (out.cpu().double() - expected).abs().max() < bound * expected.std()
    return out.cpu()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("activation", "gated", "biases"),
    [("silu", True, False), ("clamped_swiglu", True, True), ("gelu_tanh", True, False)]
    + [("gelu", True, True), ("relu2", False, True)],
)
def test_mixtures(machine, dtype, activation, gated, biases):
    experts = matrices(4, 72, 104, dtype, activation, gated, biases)
    x, logits = randn(5, 72, dtype=dtype), randn(5, 4, seed=5)
    check(machine, x, logits, Routing(2, renormalize=True), experts)


@pytest.mark.parametrize("dtype", DTYPES[::-1], ids=str)  # every day with tensor cores
def test_mixtures_in_8_bits(machine, dtype):
    """Tiles of few rows and of many, with and without tensor cores, gated and not."""
    number = DTYPES.index(dtype)
    activation, gated = [("silu", True), ("relu2", False), ("clamped_swiglu", True)][number]
    experts = matrices(4, 80, 112, dtype, activation, gated, True, kind=Int8Rows)
    for num_tokens in (5, 150):
        x, logits = randn(num_tokens, 80, dtype=dtype), randn(num_tokens, 4, seed=5)
        check(machine, x, logits, Routing(2, renormalize=True), experts)
    x, logits = randn(4, 72, dtype=dtype), randn(4, 3, seed=5)
    for kind in (Int8Rows, Fp8Rows):
        odd = matrices(3, 72, 40, dtype, activation, gated, True, kind=kind)
        check(machine, x, logits, Routing(2), odd)
    floats = matrices(3, 80, 48, dtype, activation, gated, True, kind=Fp8Rows)
    check(machine, randn(4, 80, dtype=dtype), logits, Routing(2), floats)


@pytest.mark.parametrize(("hidden", "width"), [(70, 33), (64, 36)])
def test_rows_that_are_not_aligned(machine, hidden, width):
    experts = matrices(3, hidden, width, torch.bfloat16, "silu", True, True)
    x, logits = randn(4, hidden, dtype=torch.bfloat16), randn(4, 3, seed=5)
    check(machine, x, logits, Routing(2), experts)


def test_experts_of_other_ranks_add_nothing(machine):
    x, logits = randn(9, 64, dtype=torch.bfloat16), randn(9, 6, seed=5)
    experts = matrices(2, 64, 32, torch.bfloat16, "silu", True, True, first=3)
    check(machine, x, logits, Routing(2), experts)


def test_tiles_of_many_rows_and_of_few_give_a_token_the_same_bits(machine):
    """A prompt of 150 tokens, of which one expert has all, and its last token alone."""
    x, logits = randn(150, 64, dtype=torch.float16), randn(150, 3, seed=5)
    logits[:, 1] = 9
    experts = matrices(3, 64, 32, torch.float16, "silu", True, True)
    together = check(machine, x, logits, Routing(2), experts)
    alone = check(machine, x[-1:], logits[-1:], Routing(2), experts)
    assert torch.equal(alone[0], together[-1])


def test_no_tokens(machine):
    experts = matrices(3, 64, 32, torch.float16, "silu", True, False)
    given = [it if it is None else machine.tensor(it) for it in experts[:4]]
    x, logits = machine.empty((0, 64), torch.float16), machine.empty((0, 3), torch.float32)
    kernels = CudaKernels(machine.launcher)
    own = ExpertMatrices(*given, *experts[4:])
    assert kernels.experts(x, logits, None, Routing(2), own).shape == (0, 64)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.slow
def test_mixtures_have_no_race(checked_machine, dtype):
    x, logits = randn(40, 144, dtype=dtype), randn(40, 4, seed=5)
    routing = Routing(2, "sigmoid", groups=2, top_groups=1)
    for kind in (None, Int8Rows):
        experts = matrices(4, 144, 48, dtype, "silu", True, True, kind=kind)
        check(checked_machine, x, logits, routing, experts)


def test_choices_and_their_sort_have_no_race(checked_machine, monkeypatch):
    # In a library of these two kernels: the others take long to compile.
    monkeypatch.setattr(moe, "PROGRAM", replace(moe.PROGRAM, at_once=2))
    launcher, routing = checked_machine.launcher, Routing(3, "sigmoid", groups=4, top_groups=2)
    chosen, _ = moe.choose_experts(launcher, checked_machine.tensor(randn(2, 96)), routing, None)
    moe.sort_slots(launcher, chosen, 0, 96)


def test_tensors_that_do_not_fit(machine):
    launcher = machine.launcher
    with pytest.raises(ValueError, match="33 of 40 experts for a token: at most 32 of 1024"):
        moe.choose_experts(launcher, machine.tensor(randn(1, 40)), Routing(33), None)
    with pytest.raises(ValueError, match="2 of 1025 experts for a token"):
        moe.choose_experts(launcher, machine.tensor(randn(1, 1025)), Routing(2), None)
    slots = moe.sort_slots(launcher, machine.tensor(torch.zeros(2, 2).int()), 0, 3)
    x, weight = machine.tensor(randn(2, 8)), machine.tensor(randn(10, 8))
    with pytest.raises(ValueError, match="a multiple of 3, .* the 2 rows of x, got 10 and 4"):
        moe.multiply(launcher, x, weight, None, slots, 3)
    with pytest.raises(ValueError, match="the 0 rows of x, got 10 and 4"):
        moe.multiply(launcher, x[:0], weight, None, slots, 5)
