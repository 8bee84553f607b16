"""Every op against float64, and what a result may never depend on: neighbors, chunks, threads."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import pytest
import torch
from fuzz import FUZZ
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import CPU, Cache, Sizes, new_pages, randn, rope_arguments, textbook_attention
from torch import Tensor

from gptmanager.kernels import CpuKernels, Kernels
from gptmanager.kernels.activations.activation_kinds import Activation, activate, xielu
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.simd.dtypes import DTYPES
from gptmanager.kernels.simd.threads import Team, end_threads_of_caller

pytestmark = pytest.mark.usefixtures("one_thread")
both_kernels = pytest.mark.parametrize("kernels", [Kernels(), CpuKernels()], ids=["torch", "cpu"])
WIDTH = 83  # neither a multiple of a vector nor smaller than one


def close(got: Tensor, expected: Any, tolerance: float = 4e-6) -> None:
    np.testing.assert_allclose(got.double().numpy(), expected, rtol=tolerance, atol=tolerance)


# Pages -------------------------------------------------------------------------------------------


WINDOWS = Sizes(4, 2, 32, 16, window=50, sink=4)
SHAPES = [
    Sizes(8, 4, 32, 64),
    Sizes(4, 4, 64, 16),
    Sizes(3, 1, 80, 64),
    Sizes(8, 1, 128, 16),
    Sizes(10, 2, 20, 3),
    Sizes(2, 1, 7, 1),
    Sizes(6, 3, 32, 128),
    Sizes(4, 2, 32, 64, window=50),
    Sizes(14, 2, 64, 16, window=1),
    Sizes(4, 1, 16, 3, window=10),
    WINDOWS,
    Sizes(8, 1, 16, 3, window=70, sink=69),
    Sizes(2, 2, 20, 64, window=90, sink=64),
    Sizes(2, 2, 20, 8, window=6, sink=100),
    Sizes(4, 2, 32, 16, window=67, chunked=True),
    Sizes(2, 1, 20, 64, window=32, sink=3, chunked=True),
]
ROWS = [(1, 1), (63, 63), (64, 64), (65, 70), (0, 5), (5, 200), (1, 64), (1, 65), (1, 300)]


@both_kernels
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
@pytest.mark.every(3)
def test_attention_over_pages(kernels: Kernels, sizes: Sizes) -> None:
    pages = new_pages(sizes, ROWS)
    close(pages.attend_all(kernels), textbook_attention(pages))


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_attention_is_the_same_bits_alone_chunked_and_in_any_company(sizes: Sizes) -> None:
    pages = new_pages(Sizes(sizes.heads, sizes.kv_heads, sizes.dim, sizes.block), ROWS)
    pages.sizes = sizes  # everything is there, so that any chunk may look back
    together = torch.split(pages.attend_all(CPU), [new for new, _ in ROWS])
    for row, (new, _) in enumerate(ROWS):
        assert torch.equal(pages.attend(CPU, [(row, 0, new)]), together[row])
        for cut in (1, 2, 31, 33):
            if cut < new:
                parts = [(row, cut, new), (5, 4, 5)], [(8, 0, 1), (row, 0, cut)]
                last, first = (pages.attend(CPU, part) for part in parts)
                assert torch.equal(torch.cat([first[1:], last[:-1]]), together[row])
    one_by_one = [pages.attend(CPU, [(3, i, i + 1)]) for i in range(ROWS[3][0])]
    assert torch.equal(torch.cat(one_by_one), together[3])


@settings(max_examples=20 * FUZZ)
@given(
    sizes=st.builds(
        lambda group, kv_heads, dim, block, window, sink, chunked: Sizes(
            group * kv_heads, kv_heads, dim, block, window, sink, chunked
        ),
        st.integers(1, 8),
        st.integers(1, 3),
        st.integers(1, 70),
        st.sampled_from([1, 2, 5, 16, 17, 64, 100]),
        st.none() | st.integers(1, 90),
        st.integers(0, 90),
        st.booleans(),
    ),
    rows=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 90)), max_size=4),
)
def test_attention_of_any_shape(sizes: Sizes, rows: list[tuple[int, int]]) -> None:
    pages = new_pages(sizes, [(new, new + past) for new, past in rows])
    close(pages.attend_all(CPU), textbook_attention(pages))


@both_kernels
@pytest.mark.parametrize("softcap", [1e-5, 0.3, 5.0, 1e4])
@pytest.mark.every(3)
def test_softcap_of_attention(kernels: Kernels, softcap: float) -> None:
    for sizes in (SHAPES[0], WINDOWS):
        pages = new_pages(sizes, ROWS)
        found = pages.attend_all(kernels, softcap=softcap)
        close(found, textbook_attention(pages, softcap), 1e-4)


@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.every(2)
def test_heads_with_a_score_without_a_value(kernels: Kernels, dtype: torch.dtype) -> None:
    scores = [30.0, -torch.inf, 0.5, -2.0, 4.0, 1.0]  # above all others, none, and ordinary ones
    for sizes in (SHAPES[0], WINDOWS):
        pages = new_pages(sizes, ROWS)
        sinks = torch.tensor(scores * 2, dtype=dtype)[: sizes.heads]
        close(pages.attend_all(kernels, sinks=sinks), textbook_attention(pages, sinks=sinks))
        capped = pages.attend_all(kernels, sinks=sinks, softcap=0.5)
        close(capped, textbook_attention(pages, 0.5, sinks))


def test_scores_in_a_dtype_that_the_processor_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without F16C, a model in float16 has pages in float32."""
    pages, sinks = new_pages(SHAPES[0], ROWS), torch.ones(SHAPES[0].heads, dtype=torch.float16)
    monkeypatch.delitem(DTYPES, torch.float16, raising=False)
    found, wanted = pages.attend_all(CPU, sinks=sinks), textbook_attention(pages, sinks=sinks)
    close(found, wanted)


@both_kernels
def test_attention_over_8_bit_pages(kernels: Kernels) -> None:
    pages = new_pages(SHAPES[0], ROWS)
    scales = torch.rand(2, pages.sizes.kv_heads) + 0.5
    narrow = pages.keys.to(torch.float8_e4m3fn), pages.values.to(torch.float8_e4m3fn)
    pages.keys, pages.values = (
        it.float() * own[:, None, None] for it, own in zip(narrow, scales, strict=True)
    )
    expected = pages.attend_all(Kernels())
    pages.keys, pages.values = narrow
    close(pages.attend_all(kernels, cache_scales=scales), expected.double())


@pytest.mark.parametrize("threads", [2, 5])
def test_results_are_the_same_bits_with_any_number_of_threads(threads: int) -> None:
    pages, x = new_pages(SHAPES[0], ROWS), randn(600, WIDTH)
    attended, activated = pages.attend_all(CPU), CPU.gelu(x)
    normalized = CPU.rms_norm(x, x[0], 1e-5)
    torch.set_num_threads(threads)
    assert torch.equal(pages.attend_all(CPU), attended)
    assert torch.equal(CPU.gelu(x), activated)
    assert torch.equal(CPU.rms_norm(x, x[0], 1e-5), normalized)


def test_attention_to_scores_of_any_size() -> None:
    # Given keys that make every score huge, the last position's by far the largest
    pages = new_pages(Sizes(1, 1, 32, 16), [(1, 100)])
    pages.keys *= 1e3
    pages.q[:] = pages.histories[0][0][-1]
    # Then the weight is all on it
    close(pages.attend_all(CPU)[0], pages.histories[0][1][-1, 0])


def test_attention_of_a_query_that_is_not_a_number_stays_its_own() -> None:
    pages = new_pages(SHAPES[0], [(3, 70), (1, 9)])
    expected = pages.attend_all(CPU)
    pages.q[1] = torch.nan
    got = pages.attend_all(CPU)
    assert got[1].isnan().all()
    assert torch.equal(got[[0, 2, 3]], expected[[0, 2, 3]])


def contiguous(keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """The same as views of one tensor `[P, 2, K, B, D]`."""
    whole = torch.stack((keys.mT, values), dim=1)
    return whole[:, 0].mT, whole[:, 1]


@both_kernels
@pytest.mark.parametrize(
    "sizes",
    [*SHAPES, Sizes(4, 2, 32, 300), Sizes(3, 1, 20, 301), Sizes(4, 2, 32, 320, window=100, sink=5)],
    ids=str,
)
@pytest.mark.every(3)
def test_attention_over_contiguous_keys_and_values(kernels: Kernels, sizes: Sizes) -> None:
    pages = new_pages(sizes, ROWS)
    pages.keys, pages.values = contiguous(pages.keys, pages.values)
    close(pages.attend_all(kernels), textbook_attention(pages))


def test_one_long_block_gives_the_bits_of_many() -> None:
    paged, whole = new_pages(Sizes(6, 2, 40, 64), ROWS), new_pages(Sizes(6, 2, 40, 333), ROWS)
    whole.keys, whole.values = contiguous(whole.keys, whole.values)
    assert torch.equal(whole.attend_all(CPU), paged.attend_all(CPU))


# Rotation and KV write ---------------------------------------------------------------------------


def textbook_heads(
    heads: Tensor, positions: Tensor, cos_sin: Tensor | None, weight: Tensor | None
) -> Any:
    """`[T, *, D]` normalized and turned, pair by pair."""
    x = heads.double().numpy().copy()
    if weight is not None:
        x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * weight.double().numpy()
    if cos_sin is None:
        return x
    result, half = x.copy(), cos_sin.shape[1] // 2
    for token, position in enumerate(positions.tolist()):
        for i in range(half):
            turn = complex(cos_sin[position, i], cos_sin[position, half + i])
            turned = (x[token, :, i] + 1j * x[token, :, half + i]) * turn
            result[token, :, i], result[token, :, half + i] = turned.real, turned.imag
    return result


@both_kernels
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("sizes", "rotary"),
    [
        (Sizes(8, 4, 32, 64), 32),
        (Sizes(2, 1, 80, 16), 80),
        (Sizes(3, 3, 128, 3), 32),
        (Sizes(2, 2, 20, 1), None),
    ],
    ids=str,
)
def test_rope_and_write(kernels: Kernels, sizes: Sizes, rotary: int | None, norms: bool) -> None:
    arguments = rope_arguments(sizes, rotary, norms, [(1, 1), (65, 65), (0, 3), (7, 200), (1, 64)])
    qkv, positions, cos_sin, q_norm, k_norm, _, (keys, values, *_), spans = arguments
    before = qkv.clone()
    qkv = torch.cat((qkv, qkv[:, :3]), dim=1)[:, :-3]  # rows lie apart, as after gates
    q = kernels.rope_and_write(qkv, *arguments[1:])
    heads = before.reshape(len(positions), -1, sizes.dim)
    parts = [sizes.heads, sizes.kv_heads, sizes.kv_heads]
    new_q, new_k, new_v = torch.split(heads, parts, dim=1)
    assert q.dtype is torch.float32
    assert torch.equal(qkv, before)
    close(q, textbook_heads(new_q, positions, cos_sin, q_norm))
    new_k = textbook_heads(new_k, positions, cos_sin, k_norm)
    row = [0, *[1] * 65, *[3] * 7, 4]
    for token, position in enumerate(positions.tolist()):
        page, offset = (
            spans.block_tables[row[token], position // sizes.block],
            position % sizes.block,
        )
        close(keys[page, :, :, offset], new_k[token])
        close(values[page, :, offset], new_v[token])
    # Nothing else was written
    size = len(positions) * sizes.kv_heads * sizes.dim
    assert int(keys.isfinite().sum()) == int(values.isfinite().sum()) == size


@pytest.mark.parametrize("norms", [False, True])
def test_rope_and_write_is_the_same_bits_in_any_company(norms: bool) -> None:
    rows = [(65, 65), (1, 40), (7, 200)]
    arguments = rope_arguments(Sizes(8, 4, 80, 16), 80, norms, rows)
    pages, spans = arguments[6:]
    q, keys, values = CPU.rope_and_write(*arguments), pages.keys.clone(), pages.values.clone()
    pages.keys.fill_(torch.nan)
    pages.values.fill_(torch.nan)
    # When each token comes in a step of its own
    for token, (row, length) in enumerate(
        (row, at + 1) for row, (new, end) in enumerate(rows) for at in range(end - new, end)
    ):
        one = list(arguments)
        one[0], one[1] = arguments[0][token : token + 1], arguments[1][token : token + 1]
        numbers = (torch.tensor(it, dtype=torch.int32) for it in ([0, 1], [length], [row]))
        one[7] = RowSpans(*numbers, spans.block_tables)
        assert torch.equal(CPU.rope_and_write(*one)[0], q[token])
    assert torch.equal(pages.keys.nan_to_num(), keys.nan_to_num())
    assert torch.equal(pages.values.nan_to_num(), values.nan_to_num())


# Tokens one by one -------------------------------------------------------------------------------


def textbook_norm(x: Tensor, weight: Tensor, bias: Tensor | None, centered: bool) -> Any:
    wide = x.double().numpy()
    if centered:
        wide = wide - wide.mean(-1, keepdims=True)
    scaled = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * weight.double().numpy()
    return scaled if bias is None else scaled + bias.double().numpy()


@both_kernels
@pytest.mark.parametrize("width", [1, 16, WIDTH, 1024])
@pytest.mark.parametrize("tokens", [0, 1, 63, 65])
def test_norms(kernels: Kernels, tokens: int, width: int) -> None:
    x, residual = randn(tokens, width) * 3 + 1, randn(tokens, width, seed=1)
    weight, bias = randn(width, seed=2), randn(width, seed=3)
    x[tokens // 2 : tokens // 2 + 1] = residual[tokens // 2 : tokens // 2 + 1] = 0
    added = x + residual
    close(kernels.rms_norm(x, weight, 1e-5), textbook_norm(x, weight, None, False))
    close(kernels.layer_norm(x, weight, bias, 1e-5), textbook_norm(x, weight, bias, True), 2e-5)
    close(kernels.layer_norm(x, weight, None, 1e-5), textbook_norm(x, weight, None, True), 2e-5)
    summed = residual.clone()
    got = kernels.add_rms_norm(x, summed, weight, 1e-5)
    close(got, textbook_norm(added, weight, None, False))
    assert torch.equal(summed, added)
    summed = residual.clone()
    got = kernels.add_layer_norm(x, summed, weight, bias, 1e-5)
    close(got, textbook_norm(added, weight, bias, True), 2e-5)
    assert torch.equal(summed, added)


@both_kernels
@pytest.mark.parametrize("width", [1, 16, WIDTH])
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_activations(kernels: Kernels, tokens: int, width: int) -> None:
    gate_up = randn(tokens, 2 * width) * 4
    gate, up = gate_up.double().chunk(2, dim=1)
    close(kernels.silu_mul(gate_up), gate * gate.sigmoid() * up)
    kinds: list[Literal["none", "tanh"]] = ["none", "tanh"]
    for kind in kinds:
        expected = torch.nn.functional.gelu(gate_up.double(), approximate=kind)
        close(kernels.gelu(gate_up, kind), expected)


@both_kernels
@pytest.mark.parametrize("width", [1, 16, WIDTH])
@pytest.mark.parametrize("tokens", [0, 1, 65])
def test_gates_and_sums_of_rows_with_gaps_between_them(
    kernels: Kernels, tokens: int, width: int
) -> None:
    both = randn(tokens, 2 * width + 1) * 4
    x, gates, gate = both[:, :width], both[:, width:-1], both[:, -1:]
    close(kernels.gated(x, gates), x.double() * gates.double().sigmoid())
    close(kernels.gated(x, gate), x.double() * gate.double().sigmoid())
    total = x.clone(memory_format=torch.contiguous_format)
    kernels.add_to(total, gates)
    assert torch.equal(total, x + gates)
    kernels.add_to(total[:, ::2], x[:, ::2])
    assert torch.equal(total[:, ::2], x[:, ::2] + gates[:, ::2] + x[:, ::2])


@both_kernels
@pytest.mark.parametrize("width", [1, 16, WIDTH])
def test_factors_of_activations_and_of_rows(kernels: Kernels, width: int) -> None:
    x, factors = randn(5, width), randn(5, 3, width)[:, 1]
    wanted = torch.nn.functional.silu(x.double()) * factors.double()
    close(kernels.activate_times(x.clone(), "silu", factors), wanted, 2e-5)
    for by in (randn(5, 1), randn(1)):
        for dtype in (torch.float32, torch.bfloat16):
            own, scaled = by.to(dtype), x.clone()
            kernels.scale_rows(scaled, own)
            close(scaled, x.double() * own.double(), 2e-5)
        narrow = x.bfloat16()
        kernels.scale_rows(narrow, by)  # the factors are not rounded
        assert torch.equal(narrow, (x.bfloat16().float() * by).bfloat16())


@both_kernels
def test_clamped_numbers(kernels: Kernels) -> None:
    x = torch.tensor([[-torch.inf, -2.5, -2.0, -0.0, 1.9, torch.nan], [3.0, torch.inf, *4 * [0.0]]])
    wanted = x.clamp(-2.0, 2.0)
    kernels.clamp(x, 2.0)
    assert torch.equal(x.nan_to_num(9.0), wanted.nan_to_num(9.0))


@both_kernels
def test_xielu_of_numbers_of_any_size(kernels: Kernels) -> None:
    """Near zero, the difference exp(x) - 1 - x is far smaller than its terms."""
    sizes = torch.logspace(-8, 2, 301)
    x = torch.cat([sizes, -sizes, torch.tensor([0.0, -0.5, -1e-6])]).view(5, -1)
    for numbers in (torch.tensor([0.3, -1.2]), torch.tensor([-4.0, 2.0], dtype=torch.bfloat16)):
        got = kernels.xielu(x, numbers).double()
        wanted = xielu(x.double(), numbers.double())
        assert ((got - wanted).abs() <= 5e-7 * (wanted.abs() + x.abs())).all()
    lost = kernels.xielu(torch.tensor([[torch.nan, 1.0, torch.inf]]), torch.tensor([0.3, 0.3]))
    assert lost[0].isnan().tolist() == [True, False, False] and lost[0, 2] == torch.inf


@both_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layer_norms_of_heads_with_one_weight_and_bias(
    kernels: Kernels, dtype: torch.dtype
) -> None:
    qkv, weight, bias = randn(5, 3 * WIDTH).to(dtype), randn(WIDTH).to(dtype), randn(WIDTH, seed=1)
    wanted = qkv.clone()
    for head in (1, 2):
        own = wanted[:, head * WIDTH : (head + 1) * WIDTH]
        own.copy_(Kernels().layer_norm(own.contiguous(), weight, bias.to(dtype), 1e-5))
    kernels.layer_norm_heads(qkv, range(WIDTH, 3 * WIDTH), WIDTH, weight, bias.to(dtype), 1e-5)
    close(qkv, wanted.double(), 2e-5 if dtype is torch.float32 else 0.01)


@both_kernels
@pytest.mark.parametrize("width", [1, 40])
def test_a_gate_that_is_not_a_number_makes_its_rows_so(kernels: Kernels, width: int) -> None:
    gates = torch.zeros(3, width)
    gates[1] = torch.nan
    gates[2] = -torch.inf
    result = kernels.gated(torch.ones(3, 40), gates)
    assert torch.equal(result[::2], torch.tensor([[0.5], [0.0]]).expand(2, 40))
    assert result[1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh", "relu", "relu2"])
def test_activations_of_every_value(name: Activation, dtype: torch.dtype) -> None:
    x = torch.arange(1 << 16).to(torch.int16).view(dtype).view(-1, 64)
    x[x == torch.inf] = 0  # for inf, torch's GELU is inf or NaN, depending on the length of x
    got, expected = CPU.activate(x, name, gated=False), activate(x.double(), name).to(dtype)
    torch.testing.assert_close(got, expected, rtol=0.01, atol=1e-6, equal_nan=True)


@both_kernels
def test_embedding_and_linear(kernels: Kernels) -> None:
    table, ids = randn(50, WIDTH), torch.tensor([3, 49, 0, 3])
    assert torch.equal(kernels.embedding(ids, table), table[ids])
    x, bias = randn(5, WIDTH), randn(50)
    close(kernels.linear(x, table), x.double() @ table.double().T, 2e-5)
    close(kernels.linear(x, table, bias), x.double() @ table.double().T + bias, 2e-5)


@both_kernels
@pytest.mark.parametrize(("depth", "columns"), [(16, 64), (WIDTH, 7), (1, 17)])
@pytest.mark.every(2)
def test_linear_layers_of_heads(kernels: Kernels, depth: int, columns: int) -> None:
    weight = randn(3, depth, columns)
    for tokens in (0, 1, 2, 33):
        x = randn(tokens, 3, depth + 5)[..., 5:]
        wanted = torch.einsum("thi,hio->tho", x.double(), weight.double())
        close(kernels.linear_heads(x, weight), wanted, 2e-5)


@both_kernels
def test_parts_are_joined_as_they_are(kernels: Kernels) -> None:
    x, y = randn(5, 3, 40), randn(5, 3, WIDTH)
    parts = x[..., 7:9], y, x[..., 9:10]
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        own = [it.to(dtype) for it in parts]
        assert torch.equal(kernels.joined(*own), torch.cat(own, dim=-1))
    assert torch.equal(kernels.joined(x[:, 1], y[:, 0]), torch.cat([x[:, 1], y[:, 0]], dim=-1))
    assert kernels.joined(x[:0, 1], y[:0, 0]).shape == (0, 40 + WIDTH)


OPS: dict[str, Callable[[Tensor, torch.dtype], Tensor]] = {
    "rms_norm": lambda x, dtype: CPU.rms_norm(x, randn(WIDTH).to(dtype), 1e-5),
    "add_rms_norm": lambda x, dtype: torch.cat(
        [CPU.add_rms_norm(x, residual := x.flip(1), randn(WIDTH).to(dtype), 1e-5), residual], dim=1
    ),
    "layer_norm": lambda x, dtype: CPU.layer_norm(
        x, randn(WIDTH).to(dtype), randn(WIDTH).to(dtype), 1e-5
    ),
    "add_layer_norm": lambda x, dtype: torch.cat(
        [
            CPU.add_layer_norm(x, residual := x.flip(1), randn(WIDTH).to(dtype), None, 1e-5),
            residual,
        ],
        dim=1,
    ),
    "silu_mul": lambda x, dtype: CPU.silu_mul(torch.cat([x, x.flip(1)], dim=1)),
    "gelu": lambda x, dtype: CPU.gelu(x),
    "gated": lambda x, dtype: CPU.gated(x, x.flip(1)),
    "gated_tokens": lambda x, dtype: CPU.gated(x, x[:, 5:6]),
    "gelu_tanh": lambda x, dtype: CPU.gelu(x, "tanh"),
    "activate_times": lambda x, dtype: CPU.activate_times(x, "gelu_tanh", x.flip(1)),
    "xielu": lambda x, dtype: CPU.xielu(x, torch.tensor([0.3, -1.2])),
    "linear": lambda x, dtype: CpuKernels(deterministic=True).linear(
        x, randn(100, WIDTH).to(dtype)
    ),
    "linear_small": lambda x, dtype: Kernels(deterministic=True).linear(
        x, randn(7, WIDTH).to(dtype), randn(7).to(dtype)
    ),
    "linear_deep": lambda x, dtype: Kernels(deterministic=True).linear(
        x.repeat(1, 10), randn(96, 10 * WIDTH).to(dtype)
    ),
    "linear_heads": lambda x, dtype: CpuKernels(deterministic=True).linear_heads(
        x.view(len(x), 1, -1).expand(-1, 2, -1), randn(2, WIDTH, 50).to(dtype)
    ),
    "embedding": lambda x, dtype: CPU.embedding((x[:, 0].abs() * 10).long(), randn(100, 8)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", OPS)
def test_tokens_are_the_same_bits_in_any_company(op: str, dtype: torch.dtype) -> None:
    x = randn(70, WIDTH).to(dtype)
    together = OPS[op](x, dtype)
    assert op == "embedding" or together.dtype is dtype
    for tokens in range(1, 71):
        for start in {0, (tokens * 7) % (71 - tokens), 70 - tokens}:
            alone = OPS[op](x[start : start + tokens].clone(), dtype)
            assert torch.equal(alone, together[start : start + tokens]), (tokens, start)


# Threads, caches, and the border -----------------------------------------------------------------


def test_two_threads_compute_at_the_same_time() -> None:
    # Given what a step of either of two managers computes, alone
    cases = [new_pages(sizes, ROWS) for sizes in SHAPES[:2]]
    x = randn(600, WIDTH)
    expected = [(pages.attend_all(CPU), CPU.gelu(x)) for pages in cases]
    wrong = []

    def repeat(pages: Cache, attended: Tensor, activated: Tensor) -> None:
        kernels = CpuKernels()
        for _ in range(20):
            right = torch.equal(pages.attend_all(kernels), attended)
            if not right or not torch.equal(kernels.gelu(x), activated):
                wrong.append(pages.sizes)

    # When both do it again and again, each in a thread of its own and with two of torch's
    torch.set_num_threads(2)
    threads = [
        threading.Thread(target=repeat, args=(pages, *results))
        for pages, results in zip(cases, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    # Then both end, and every bit is the same
    assert not any(thread.is_alive() for thread in threads)
    assert not wrong


def test_one_thread_does_where_torch_has_another_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = new_pages(SHAPES[0], ROWS)
    expected = pages.attend_all(CPU)
    torch.set_num_threads(2)
    alone = CpuKernels()
    monkeypatch.setattr(alone._team, "_parallel", None)
    assert alone._team.max_size == 1
    assert torch.equal(pages.attend_all(alone), expected)


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is what torch uses on Linux")
def test_the_threads_of_a_caller_end_and_come_again() -> None:
    def threads() -> set[str]:
        return set(os.listdir("/proc/self/task"))

    def compute() -> Tensor:
        return CPU.gelu(torch.arange(100_000, dtype=torch.float32))

    end_threads_of_caller()
    expected, before = compute(), threads()  # some may be of earlier tests, and end by themselves
    torch.set_num_threads(2)
    for _ in range(2):
        assert torch.equal(compute(), expected) and len(threads() - before) == 1
        end_threads_of_caller()
        assert threads() <= before


@pytest.mark.skipif(sys.platform != "linux", reason="GNU OpenMP is what torch uses on Linux")
def test_the_team_is_as_large_as_torch_says() -> None:
    assert Team().max_size == 1
    torch.set_num_threads(2)
    assert Team().max_size == 2


def test_attention_shapes_have_defaults() -> None:
    assert AttentionShape(4, 2, 8, 0.5) == AttentionShape(4, 2, 8, 0.5, None, 0, 0.0, False)


def test_memory_laid_out_otherwise_is_refused() -> None:
    pages = new_pages(SHAPES[0], ROWS)
    pages.keys = pages.keys.transpose(1, 3).contiguous().transpose(1, 3)
    with pytest.raises(TypeError, match="contiguous torch.float32 tensor, got a strided"):
        pages.attend_all(CPU)
    pages = new_pages(SHAPES[0], ROWS)
    pages.keys = torch.stack((pages.keys, pages.keys), dim=1)[:, 0]
    with pytest.raises(TypeError, match="equal block strides"):
        pages.attend_all(CPU)
    pages = new_pages(SHAPES[0], ROWS)
    pages.block_tables = pages.block_tables.long()
    with pytest.raises(TypeError, match=r"contiguous torch.int32 .* got a contiguous torch.int64"):
        pages.attend_all(CPU)


@pytest.mark.parametrize("norms", [False, True])
def test_contiguous_keys_and_values_are_written_as_pages_are(norms: bool) -> None:
    sizes = Sizes(4, 2, 20, 16)
    arguments = [*rope_arguments(sizes, 16, norms, [(1, 1), (65, 65), (7, 200)])]
    q = CPU.rope_and_write(*arguments)
    others = [*arguments]
    keys, values, *_ = arguments[6]
    others[6] = Pages(*contiguous(*(torch.full_like(it, torch.nan) for it in (keys, values))))
    assert torch.equal(CPU.rope_and_write(*others), q)
    for pages, written in zip(others[6][:2], (keys, values), strict=True):
        assert torch.equal(pages.nan_to_num(), written.nan_to_num())


# Narrow dtypes: the bits of the same numbers in float32, rounded once -----------------------------

narrow = pytest.mark.parametrize("dtype", [it for it in DTYPES if it.itemsize == 2], ids=str)


@narrow
@pytest.mark.parametrize(
    "sizes", [*SHAPES, Sizes(6, 2, 40, 64), Sizes(3, 1, 20, 7), Sizes(4, 4, 128, 16)], ids=str
)
@pytest.mark.parametrize("token_major", [False, True])
def test_attention_over_narrow_pages(dtype: torch.dtype, sizes: Sizes, token_major: bool) -> None:
    pages = new_pages(sizes, ROWS)
    pages.keys, pages.values, pages.q = (
        it.to(dtype).float() for it in (pages.keys, pages.values, pages.q)
    )
    if token_major:
        pages.keys, pages.values = contiguous(pages.keys, pages.values)
    wide = pages.attend_all(CPU)
    pages.keys = pages.keys.mT.to(dtype).mT if token_major else pages.keys.to(dtype)
    pages.values = pages.values.to(dtype)
    if token_major:
        pages.keys, pages.values = contiguous(pages.keys, pages.values)
    assert torch.equal(pages.attend_all(CPU), wide)
    pages.q = pages.q.to(dtype)
    got = pages.attend_all(CPU)
    assert got.dtype is dtype
    assert torch.equal(got, wide.to(dtype))


@narrow
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("narrow_qkv", [False, True])
def test_rope_and_write_to_narrow_pages(
    dtype: torch.dtype, norms: bool, token_major: bool, narrow_qkv: bool
) -> None:
    sizes, rows = Sizes(4, 2, 20, 16), [(1, 1), (65, 65), (7, 200)]
    arguments = list(rope_arguments(sizes, 16, norms, rows))
    if narrow_qkv:
        given = (arguments[i] for i in (0, 3, 4))
        rounded = (None if it is None else it.to(dtype) for it in given)
        arguments[0], arguments[3], arguments[4] = rounded
    keys, values, *_ = arguments[6]
    q = CPU.rope_and_write(*arguments)
    assert q.dtype is torch.float32
    own = tuple(torch.full_like(it, torch.nan, dtype=dtype) for it in (keys, values))
    arguments[6] = Pages(*(contiguous(*own) if token_major else own))
    got = CPU.rope_and_write(*arguments)
    assert got.dtype is dtype
    assert torch.equal(got, q.to(dtype))
    for written, expected in zip(arguments[6][:2], (keys, values), strict=True):
        assert torch.equal(written.isnan(), expected.isnan())
        assert torch.equal(written.nan_to_num(), expected.to(dtype).nan_to_num())


@narrow
@pytest.mark.parametrize("width", [1, 16, WIDTH, 2 * WIDTH])
def test_norms_and_activations_of_narrow_tensors(dtype: torch.dtype, width: int) -> None:
    x, weight, bias = (randn(n, width, seed=n).to(dtype) for n in (9, 1, 1))
    weight, bias = weight[0], bias[0]
    assert torch.equal(CPU.gelu(x), CPU.gelu(x.float()).to(dtype))
    both = torch.cat((x, x.flip(0)), dim=1)
    assert torch.equal(CPU.silu_mul(both), CPU.silu_mul(both.float()).to(dtype))
    expected = CPU.layer_norm(x.float(), weight.float(), bias.float(), 1e-5).to(dtype)
    assert torch.equal(CPU.layer_norm(x, weight, bias, 1e-5), expected)
    for own in (weight, weight.float()):  # a weight of another dtype is not rounded
        residual, summed = x.flip(0), x + x.flip(0)
        got = CPU.add_rms_norm(x, residual, own, 1e-5)
        assert torch.equal(residual, summed)
        assert torch.equal(got, CPU.rms_norm(summed.float(), own.float(), 1e-5).to(dtype))
    for own, residual in ((x, x.flip(0).float()), (x.float(), x.flip(0))):
        got = CPU.add_rms_norm(own, residual.clone(), weight, 1e-5)
        assert got.dtype is own.dtype, "not the dtype of the residual"
        close(got, Kernels().add_rms_norm(own, residual, weight, 1e-5).double(), 1e-2)
    fine = 1 + weight.float() / 4096
    assert torch.equal(CPU.rms_norm(x, fine, 1e-5), CPU.rms_norm(x.float(), fine, 1e-5).to(dtype))


@narrow
def test_what_is_rounded_is_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """Ties, what leaves the dtype, what is too small for it, and what is no number."""
    ties = torch.tensor([1.00390625, 1.01171875, 1.00048828125, 1.00146484375])
    odd = torch.tensor([65519.9, 65520.0, 3.4e38, 6e-8, 1e-40, -0.0, torch.inf, torch.nan])
    values = torch.cat((ties, -ties, odd, -odd, randn(40)))
    rows = [(len(values), len(values))]
    arguments = list(rope_arguments(Sizes(1, 1, 1, 16), None, False, rows))
    arguments[0] = values.unsqueeze(1).repeat(1, 3)
    own = (torch.zeros_like(it, dtype=dtype) for it in arguments[6][:2])
    arguments[6] = Pages(*own)
    got = CPU.rope_and_write(*arguments).flatten()
    assert torch.equal(got.isnan(), values.isnan())
    expected = values.to(dtype).nan_to_num(nan=7.0)
    assert torch.equal(got.nan_to_num(nan=7.0), expected)
    assert torch.equal(got.signbit()[~got.isnan()], values.signbit()[~values.isnan()])
