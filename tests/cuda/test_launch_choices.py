"""Which kernel a card of 132 multiprocessors launches, and how many blocks: at the sizes of
Llama-3.1-8B, and where another kernel is to be taken. All of them give the same results: tests of
values do not see a choice that takes twice the time.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gptmanager.cuda import activations, norms, state_space
from gptmanager.cuda.attention.context_attention import plan_context
from gptmanager.cuda.attention.generation_attention import GenerationWork, generation_attention
from gptmanager.cuda.gemm import gemv as products
from gptmanager.cuda.gemm.own_matmuls import OwnMatmuls
from gptmanager.cuda.sampling import sampling, token_masks
from gptmanager.cuda.sampling.sampling import PARAMS
from gptmanager.kernels.attention.attention_arguments import AttentionShape, Pages, RowSpans
from gptmanager.kernels.recurrent.convolution import Filter
from gptmanager.kernels.recurrent.state_space_formulas import (
    StateSpaceShape,
    StateSpaceState,
    StateSpaceTensors,
)

BF16, FLOAT, INT, LONG = torch.bfloat16, torch.float32, torch.int32, torch.int64


class Card:
    """Keeps what is launched: the instantiation, its grid and its threads."""

    num_multiprocessors, max_shared_mem = 132, 227 << 10

    def __init__(self):
        self.launched = []
        self.arguments = []

    def kernel(self, program, name, shared_mem=0):
        assert name in program.kernels

        def launch(grid, block, arguments, shared_mem=0):
            self.arguments.append(arguments)
            self.launched.append((name.replace("__nv_bfloat16", "bf16"), grid, block[0]))

        return launch


@pytest.fixture
def card():
    return Card()


def empty(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize(
    ("width", "dtype", "expected"),
    [
        (4096, BF16, ("norm<bf16, 8, 1, false, false>", 512)),  # whose weight comes early
        (4104, BF16, ("norm<bf16, 8, 2, false, false>", 288)),
        (8192, BF16, ("norm<bf16, 8, 2, false, false>", 512)),
        (16384, BF16, ("norm<bf16, 8, 4, false, false>", 512)),
        (4096, FLOAT, ("norm<float, 4, 2, false, false>", 512)),
        (512, BF16, ("norm<bf16, 8, 1, false, false>", 64)),
        (100, BF16, ("norm<bf16, 1, 1, false, false>", 128)),
    ],
)
def test_a_norm_has_as_few_vectors_a_thread_as_512_threads_allow(card, width, dtype, expected):
    x = empty(7, width, dtype=dtype)
    norms.norm(card, x, x, empty(width, dtype=dtype), None, 1e-5)
    assert card.launched == [(expected[0], (7,), expected[1])]


def test_an_activation_of_a_row_is_cut_into_blocks_of_128_vectors(card):
    activations.activate_gated(card, empty(5, 14336), empty(5, 28672))
    assert card.launched == [("activate_gated<bf16, 8, SILU>", (5, 14), 128)]


@pytest.mark.parametrize(
    ("shape", "dtype", "width", "scan", "norm"),
    [
        # Granite 4.0-H Small: an output of 8,192 elements has eight for each thread
        (StateSpaceShape(128, 64, 128, 1, 4), BF16, 4, ("128", (128, 1), 128), (1, 1024)),
        (StateSpaceShape(32, 80, 132, 2, 5, 8), FLOAT, 8, ("256", (32, 2), 256), (8, 320)),
    ],
    ids=["Granite", "other"],
)
def test_blocks_of_a_state_space(card, shape, dtype, width, scan, norm):
    heads, own = shape.heads, {"dtype": dtype}
    of_heads = (empty(heads, dtype=FLOAT) for _ in range(3))
    conv = Filter(empty(shape.width, shape.channels, **own))
    state = StateSpaceState(
        empty(9, shape.width - 1, shape.channels, **own),
        empty(9, heads, shape.state, shape.head_dim, dtype=FLOAT),
    )
    rows = RowSpans(empty(4, dtype=INT), *(empty(3, dtype=INT) for _ in range(2)), None)
    given = shape, StateSpaceTensors(conv, *of_heads, empty(shape.inner, **own)), 1e-5, state, rows
    out, projected = empty(7, shape.inner, **own), empty(7, shape.projected, **own)
    state_space.state_space(card, out, projected, *given)
    name, (grid, threads) = "bf16" if dtype is BF16 else "float", scan[1:]
    assert card.launched == [
        (f"convolve<{name}, {width}>", (3, -(-shape.channels // 128)), 128),
        (f"scan<{name}, {scan[0]}>", (3, *grid), threads),
        (f"norm_gated<{name}>", (7, norm[0]), norm[1]),
    ]


@pytest.mark.parametrize(("heads", "tiles"), [(8, 1), (32, 1), (64, 1), (72, 2), (128, 2)], ids=str)
def test_two_tiles_of_queries_from_nine_heads_a_kv_head_on(card, heads, tiles):
    shape = AttentionShape(heads, 8, 128, 1.0)
    queries = empty(3, heads, 128)
    pages = Pages(empty(9, 8, 16, 128).transpose(2, 3), empty(9, 8, 16, 128))
    numbers = {"row_starts": 4, "kv_lengths": 3, "slots": 3}
    rows = RowSpans(
        **{name: empty(n, dtype=INT) for name, n in numbers.items()},
        block_tables=empty(3, 4, dtype=INT),
    )
    work = GenerationWork(
        empty(11, 4, dtype=INT),
        empty(50, dtype=INT),
        empty(4, dtype=INT),
        empty(11, heads, 128, dtype=FLOAT),
        empty(11, heads, dtype=FLOAT),
        empty(3, 8, dtype=INT),
    )
    generation_attention(card, queries, queries, pages, rows, work, shape)
    assert card.launched == [(f"generation_attention<bf16, 128, {tiles}>", (49, 8), 128)]


def test_items_of_contexts_cover_only_visible_positions():
    """The longest first: row, first packed query, first and last (excluded) position."""
    num_new, kv_lengths = np.array([40, 0, 3], np.int32), np.array([140, 5, 3], np.int32)
    whole = AttentionShape(8, 2, 128, 1.0)  # 32 tokens of 4 heads are an item
    items = plan_context(num_new, kv_lengths, whole)
    assert items.tolist() == [[0, 128, 0, 140], [0, 0, 0, 132], [2, 0, 0, 3]]
    items = plan_context(num_new, kv_lengths, whole._replace(window=16))
    assert items.tolist() == [[0, 0, 85, 132], [0, 128, 117, 140], [2, 0, 0, 3]]


@pytest.mark.parametrize(
    ("rows", "width", "dtype", "expected"),
    [
        # four tiles of 8 weight rows, if three quarters of the card then have work
        (1, 4096, BF16, ("gemv<bf16, 4, false>", 128)),
        (16, 6144, BF16, ("gemv<bf16, 4, false>", 132)),
        (16, 3136, BF16, ("gemv<bf16, 2, false>", 132)),
        (1, 1024, BF16, ("gemv<bf16, 2, false>", 64)),
        (17, 1024, BF16, ("gemv<bf16, 2, false>", 128)),
        (8, 512, FLOAT, ("gemv<float, 2, false>", 32)),
        (9, 512, FLOAT, ("gemv<float, 2, false>", 64)),
    ],
)
def test_products_of_few_rows(card, rows, width, dtype, expected):
    x, weight = empty(rows, 64, dtype=dtype), empty(width, 64, dtype=dtype)
    products.multiply(card, empty(rows, width, dtype=dtype), x, weight)
    assert card.launched == [(expected[0], (expected[1],), 512)]


def test_gate_and_up_are_always_four_tiles(card):
    products.multiply(card, empty(2, 520), empty(2, 64), empty(1040, 64), silu=True)
    assert card.launched == [("gemv<bf16, 4, true>", (33,), 512)]


def test_all_matmuls_of_tiles_have_the_same_counters(card):
    """A recording has their address."""
    own = OwnMatmuls(card)
    for rows in (64, 200):
        own.multiply(empty(rows, 4096), empty(rows, 4096), empty(4096, 4096), None)
    first, second = (arguments[2] for arguments in card.arguments)
    assert first is second and first.dtype is INT


@pytest.mark.parametrize(
    ("rows", "vocab_size", "blocks"),
    [
        (1, 128_256, 8),
        (16, 128_256, 16 * 8),
        (17, 128_256, 17 * 7),
        (66, 128_256, 66 * 2),  # as many as the card runs at a time
        (67, 128_256, 67),
        (256, 128_256, 256),
        (1, 16_384, 1),  # has work for the warps of one block
        (1, 16_392, 2),
    ],
)
def test_how_many_blocks_share_rows_of_logits(card, rows, vocab_size, blocks):
    numbers = empty(rows, dtype=INT), empty(rows, dtype=LONG)
    tokens, params = empty(rows, dtype=INT), empty(9, PARAMS.itemsize, dtype=torch.uint8)
    workspace = sampling.Workspace.of(card, torch.device("meta"))
    logits = empty(rows, vocab_size)
    sampling.sample(card, tokens, tokens, logits, params, *numbers, workspace)
    assert card.launched == [("sample<bf16, 8>", (blocks,), 512)]


def test_a_mask_is_cut_into_stretches_of_8192_tokens(card):
    masks = empty(3, 4008, dtype=INT)
    token_masks.mask_logits(card, empty(4, 128_256, dtype=FLOAT), empty(3, dtype=INT), masks)
    assert card.launched == [("mask_logits", (3, 16), 256)]
