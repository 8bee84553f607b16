"""The tokens of the rules, applied to each row in float64."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from kernel_values import randn

from gptmanager.cuda import emulator
from gptmanager.cuda.device import compiler
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.sampling.sampling import PARAMS, Workspace, num_parts, pack, sample
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import NO_TOKEN, NOT_FINITE

pytestmark = pytest.mark.every(5)

WORD = 2**32 - 1


def philox4x32(counter, key):
    """Philox4x32-10 (Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = right >> 32 ^ c1 ^ k0, right & WORD, left >> 32 ^ c3 ^ k1, left & WORD
        k0, k1 = (k0 + 0x9E3779B9) & WORD, (k1 + 0xBB67AE85) & WORD
    return c0, c1, c2, c3


def uniform(seed, position, draw):
    words = philox4x32((position & WORD, position >> 32, draw, 0), (seed & WORD, seed >> 32))
    return ((words[0] << 32 | words[1]) >> 11) * 2.0**-53


def textbook(logits, params, position):
    x = logits.astype(np.float32)
    if not (x < np.inf).all():
        return NOT_FINITE
    best = int(x.argmax())
    if x[best] == -np.inf:
        return NO_TOKEN
    with np.errstate(all="ignore"):
        scaled = x / np.float32(params.temperature)
    if params.greedy or params.temperature <= 0 or not np.isfinite(scaled[best]):
        return best
    ids = np.arange(len(x))
    kth = np.sort(scaled)[-min(params.top_k or len(x), len(x))]
    weights = np.where(scaled >= kth, np.exp((scaled - scaled[best]).astype(np.float64)), 0.0)
    total = weights.sum()
    weights = np.where(weights >= params.min_p, weights, 0.0)
    draw = 0
    while True:
        sums = weights.cumsum()
        chosen = int((sums <= uniform(params.seed, position, draw) * sums[-1]).sum())
        # Outside of the nucleus if what ranks above it has p already: one of that instead.
        above = np.where(scaled > scaled[chosen], weights, 0.0)
        ties = np.where((scaled == scaled[chosen]) & (ids < chosen), weights, 0.0)
        for higher in (above, above + ties):
            rest = np.float32(1 - higher.sum() / total)
            if params.top_p < 1 and higher.sum() > 0 and rest <= np.float32(1 - params.top_p):
                weights = higher
                break
        else:
            return chosen
        draw += 1


def choose(machine, logits, params, positions, workspace=None):
    """By the kernel and by the rules; a slot for each row, in reverse, and a cell of inputs."""
    num_rows, vocab_size = logits.shape
    packed = [pack(own, vocab_size) for own in reversed(params)]
    table = np.array(packed, dtype=PARAMS).view(np.uint8).reshape(num_rows, -1)
    slots = np.arange(num_rows, dtype=np.int32)[::-1].copy()
    tokens = machine.empty((num_rows,), torch.int32)
    inputs = machine.empty((num_rows + 2,), torch.int32)
    before, cells = inputs.cpu(), slots.astype(np.int64) + 1
    given = map(torch.from_numpy, (table, slots, positions))
    sample(
        *(machine.launcher, tokens, inputs, machine.tensor(logits)),
        *map(machine.tensor, given),
        workspace,
        cells=machine.tensor(torch.from_numpy(cells)),
    )
    before[cells] = tokens.cpu().clamp(min=0)
    assert torch.equal(inputs.cpu(), before)
    rows = zip(logits.float().numpy(), params, positions.tolist(), strict=True)
    return tokens.cpu().tolist(), [textbook(*row) for row in rows]


def check(machine, logits, params, first_position=100, workspace=None):
    positions = np.arange(len(logits), dtype=np.int64) + first_position
    got, expected = choose(machine, logits, params, positions, workspace)
    assert got == expected
    return got


def rows(count, vocab_size, scale=2.0):
    return randn(count, vocab_size, seed=vocab_size) * scale


def drawing(count, **options):
    return [SamplingParams(greedy=False, seed=i * 2**33 + 7, **options) for i in range(count)]


@pytest.mark.parametrize("vocab_size", [1, 30, 1003, 4096, 5000])
def test_greedy_and_unlimited(machine, vocab_size):
    logits = rows(6, vocab_size)
    check(machine, logits, [SamplingParams()] * 6)
    check(machine, logits, drawing(6, temperature=0.7))


@pytest.mark.parametrize(
    "options",
    [
        {"top_k": 5},
        {"top_k": 1002},
        {"top_p": 0.9},
        {"top_p": 0.1},
        {"top_p": 1e-6},
        {"min_p": 0.2},
        {"top_k": 40, "top_p": 0.8, "min_p": 0.05, "temperature": 1.5},
    ],
    ids=str,
)
def test_limits(machine, options):
    check(machine, rows(12, 1003), drawing(12, **options))


def test_rows_are_their_own(machine):
    params = [
        *drawing(3, top_k=3),
        SamplingParams(),
        *drawing(3, top_p=0.5),
        *drawing(3, temperature=0.0),
    ]
    together = check(machine, rows(10, 4096), params)
    for row in range(10):
        alone = check(machine, rows(10, 4096)[row : row + 1], params[row : row + 1], 100 + row)
        assert alone == together[row : row + 1]


KINDS = [
    SamplingParams(),
    *drawing(1, temperature=0.7),
    *drawing(1, top_p=0.6),
    *drawing(1, top_k=9),
    *drawing(1, top_k=600, top_p=0.8),
    *drawing(1, min_p=0.1),
]


def shared(machine):
    with torch.inference_mode():
        workspace = Workspace.of(machine.launcher, machine.stream.device)
    return workspace


@pytest.mark.parametrize("vocab_size", [24_800, 24_801])
def test_blocks_that_share_a_row(machine, vocab_size):
    """One by one the rows have several blocks each, together one."""
    logits, workspace = rows(len(KINDS), vocab_size), shared(machine)
    logits[:, 20_000] = 14.0
    assert num_parts(machine.launcher, 1, vocab_size) > 1
    together = check(machine, logits, KINDS)
    for row, own in enumerate(KINDS):
        place = slice(row, row + 1)
        got = check(machine, logits[place], [own], 100 + row, workspace)
        assert got == together[place]
        assert not workspace.arrived.any()


@pytest.mark.parametrize(
    ("vocab_size", "parts"),
    [(8192, 1), (8193, 2), (16_384, 1), (16_392, 2), (32_000, 2), (32_001, 4), (128_256, 8)],
)
def test_no_block_of_a_row_is_without_pieces(vocab_size, parts):
    """A block has 16 warps. A warp reads pieces of 512 logits, or of 1024 in vectors of 8."""
    machine = SimpleNamespace(num_multiprocessors=132)
    assert num_parts(machine, 1, vocab_size) == parts


@pytest.mark.parametrize("vocab_size", [1003, 9000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits(machine, dtype, vocab_size):
    """The same as from the same logits in single precision."""
    logits = rows(len(KINDS), vocab_size).to(dtype)
    params = KINDS
    assert check(machine, logits, params) == check(machine, logits.float(), params)


def test_a_huge_vocabulary(machine):
    """A piece of a row is more than a warp takes at a time."""
    logits = rows(4, 300_000)
    logits[0, 299_999] = logits[1, 31 * 2048 + 1030] = 20.0
    check(machine, logits, [KINDS[0], KINDS[0], KINDS[2], KINDS[3]])


def test_rows_without_work(machine):
    given = (machine.tensor(torch.tensor([value])) for value in (7, 8))
    tokens, inputs = (own.int() for own in given)
    none = machine.tensor(torch.tensor([-1], dtype=torch.int32))
    table = machine.tensor(torch.zeros(1, PARAMS.itemsize, dtype=torch.uint8))
    logits = machine.tensor(torch.zeros(1, 40))
    sample(machine.launcher, tokens, inputs, logits, table, none, none.long())
    assert (tokens.tolist(), inputs.tolist()) == ([7], [8])


def test_rows_without_a_cell(machine):
    logits, cells = rows(3, 40), torch.tensor([-1, 0, -1])
    given = np.array([pack(SamplingParams(), 40)] * 3, dtype=PARAMS).view(np.uint8).reshape(3, -1)
    tokens, inputs = machine.empty((3,), torch.int32), machine.tensor(torch.tensor([6, 7, 8]).int())
    own = torch.from_numpy(given), torch.arange(3).int(), torch.arange(3)
    sample(
        *(machine.launcher, tokens, inputs[1:], machine.tensor(logits), *map(machine.tensor, own)),
        cells=machine.tensor(cells),
    )
    best = logits.argmax(dim=1).tolist()
    assert (tokens.tolist(), inputs.tolist()) == (best, [6, best[1], 8])


def test_inputs_are_in_the_order_of_rows_where_no_cells_are_given(machine):
    logits = rows(3, 40)
    tokens, inputs = (machine.empty((3,), torch.int32) for _ in range(2))
    table = np.array([pack(SamplingParams(), 40)], dtype=PARAMS).view(np.uint8)
    slots = machine.tensor(torch.zeros(3, dtype=torch.int32))
    given = machine.tensor(logits), machine.tensor(torch.from_numpy(table).view(1, -1)), slots
    sample(machine.launcher, tokens, inputs, *given, machine.tensor(torch.zeros(3).long()))
    assert tokens.tolist() == inputs.tolist() == logits.argmax(dim=1).tolist()


def test_more_candidates_than_fit(machine):
    logits = rows(4, 5000).round()  # many ties: top-k keeps all that tie with the last
    check(machine, logits, drawing(4, top_k=1500))
    check(machine, logits, drawing(4, top_k=2000, top_p=0.7))
    check(machine, logits[:1].repeat(30, 1), drawing(30, top_p=0.3))
    check(machine, torch.zeros(4, 5000), drawing(4, top_k=7))


@pytest.mark.parametrize("scale", [0.02, 1.0, 8.0])
def test_a_wide_top_k(machine, scale):
    """What reaches the last of them fits or does not, is far below the best or about as good."""
    logits = rows(6, 9001, scale)
    logits[4:, 600:8900] = -torch.inf
    for top_k in (513, 700, 2040, 2500, 6000):
        check(machine, logits, drawing(6, top_k=top_k))
    check(machine, logits, drawing(6, top_k=800, top_p=0.9, temperature=0.6))
    check(machine, rows(2, 4100, 30.0), drawing(2, top_k=4000))


@pytest.mark.parametrize("top_k", [5, 600])
@pytest.mark.parametrize("ties", [2048, 2049])
def test_as_many_candidates_as_fit_and_one_more(machine, ties, top_k):
    logits = torch.zeros(1, 3000)
    logits[:, 400 : 400 + ties] = 1.0
    got = check(machine, logits.repeat(8, 1), drawing(8, top_k=top_k))
    assert all(400 <= token < 400 + ties for token in got)


@pytest.mark.parametrize("top_k", [5, 600])
def test_a_candidate_too_many_is_written_nowhere(checked_machine, top_k):
    logits = torch.full((1, 2500), -1.0)
    logits[:, 400:2449] = 1.0
    check(checked_machine, logits, drawing(1, top_k=top_k))


@pytest.mark.parametrize("second", [1948, 1949])
def test_bins_that_fit_together_and_by_one_do_not(machine, second):
    """100 tokens in the first bin, and the k-th best in the second."""
    logits = torch.full((1, 3000), -3.0)
    logits[:, 400:500], logits[:, 500 : 500 + second] = 0.0, -1.25 / 64
    got = check(machine, logits.repeat(8, 1), drawing(8, top_k=600))
    assert all(400 <= token < 500 + second for token in got)


def test_bins_that_hold_just_as_many_as_top_k(machine):
    """Behind them are empty ones, to which as many rank above."""
    logits = torch.full((1, 3000), -3.0)
    logits[:, :1050], logits[:, 1050:2100] = 0.0, -1.25 / 64
    got = check(machine, logits.repeat(40, 1), drawing(40, top_k=2100))
    assert all(token < 2100 for token in got)


def test_the_border_of_a_bin(machine):
    """The lowest logit of the first bin is the k-th best, and many are the best of the second."""
    border = np.float32(-1 / 64)
    logits = torch.full((1, 3000), float(border))
    logits[:, 1:600], logits[:, 2000] = 0.0, float(np.nextafter(border, np.float32(0)))
    got = check(machine, logits.repeat(8, 1), drawing(8, top_k=600))
    assert all(1 <= token < 600 or token == 2000 for token in got)


def test_a_share_of_the_best_that_is_all_of_it(machine):
    logits = rows(20, 100)
    logits[:, [7, 40, 90]] = 9.0
    for own in ({"temperature": 1.0}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.5}):
        got = check(machine, logits, drawing(20, min_p=1.0, **own))
        assert {7, 40} <= set(got) <= {7, 40, 90}


def test_a_nucleus_is_compared_in_single_precision(machine):
    """In double precision two of three equal tokens have less than p, and the third may come."""
    assert 2 / 3 < 0.66666667
    assert set(check(machine, torch.zeros(40, 3), drawing(40, top_p=0.66666667))) == {0, 1}


def test_both_zeros_tie_with_the_last_of_top_k(machine):
    logits = torch.full((1, 600), -3.0)
    logits[:, 0], logits[:, 1:40:2], logits[:, 2:40:2] = 1.0, 0.0, -0.0
    got = check(machine, logits.repeat(40, 1), drawing(40, top_k=2))
    assert {token % 2 for token in got if token} == {0, 1}


def test_quotients_tie_not_products_with_the_reciprocal(machine):
    steps = torch.tensor([[3.0, 2.0], [1.0, 0.0]])
    logits = torch.cat([torch.full((2, 1), 7.1), 7 + steps * 2.0**-21], dim=1)
    for row, tied in enumerate([{0, 1, 2}, {0, 1}]):
        params = drawing(30, top_k=2, temperature=1.5)
        assert set(check(machine, logits[row].repeat(30, 1), params)) == tied


def test_ties_of_a_nucleus_rank_by_id(machine):
    assert max(check(machine, torch.zeros(20, 64), drawing(20, top_p=0.25))) == 15


def test_odd_logits(machine):
    inf, nan = torch.inf, torch.nan
    logits = torch.tensor(
        [[-inf] * 4, [nan, 1.0, nan, 0.0], [0.0, inf, 3.0, inf], [-inf, -inf, 2.0, -inf]]
    )
    for own in (SamplingParams(), drawing(1)[0], drawing(1, top_k=2)[0], drawing(1, top_p=0.5)[0]):
        check(machine, logits, [own] * 4)
    check(machine, logits, drawing(4, temperature=1e-40))


def test_there_is_no_race(checked_machine):
    check(checked_machine, rows(2, 300), drawing(2, top_k=20, top_p=0.5, min_p=0.01))
    check(checked_machine, rows(1, 2300), drawing(1, top_k=520))
    check(checked_machine, rows(1, 16_400), drawing(1, top_k=4), 100, shared(checked_machine))
    check(checked_machine, rows(2, 8_200), drawing(2, top_k=4), 100, shared(checked_machine))


def test_as_many_pieces_as_there_is_room_for(checked_machine):
    logits = torch.zeros(1, 256 * 1024)
    logits[0, -1] = 1.0
    check(checked_machine, logits, [SamplingParams()])


FIND_TOKEN = """
#include "sampling/logits_row.cuh"
template <int WIDTH> __global__ void find(
    int* token, const float* weights, const double* sums, double rest, int size) {
    __shared__ double own[PIECES];
    for (int i = threadIdx.x; i < PIECES; i += 32) own[i] = sums[i];
    __syncwarp();
    Row<float, WIDTH> row{weights, size};
    int found = find_token(row, own, rest, [](float value, int) { return fmaxf(value, 0.0f); });
    if (threadIdx.x == 0) *token = found;
}
"""


def test_the_room_for_what_blocks_leave_for_each_other(toolchain):
    source = """
    #include "sampling/logits_row.cuh"
    __global__ void size(int* bytes) { *bytes = sizeof(Pieces); }"""
    options, bytes_ = [f"-I{compiler.FOLDER}"], emulator.empty(1, np.int32)
    module = emulator.Module(source=source, name_expressions=["size"], options=options)
    module.get_function("size")((1,), (1,), (bytes_,))
    workspace = Workspace.of(EmulatorLauncher(), torch.device("cpu"))
    assert len(workspace.arrived) == EmulatorLauncher.num_multiprocessors // 2
    assert len(workspace.pieces) == len(workspace.arrived) * int(bytes_[0])


def test_where_a_sum_passes_and_where_by_rounding_it_does_not(toolchain):
    names, options = ["find<1>", "find<4>"], [f"-I{compiler.FOLDER}"]
    module = emulator.Module(source=FIND_TOKEN, name_expressions=names, options=options)
    token = emulator.empty(1, np.int32)
    weights, sums = np.zeros(1500, np.float32), np.zeros(256)
    weights[[3, 9, 600, 640, 641, 900]] = 1.0  # in two of three pieces of 512
    sums[:2] = 2.0, 4.0

    def found(rest, width=1):
        find = module.get_function(f"find<{width}>")
        arrays = (emulator.asarray(array) for array in (weights, sums))
        find((1,), (32,), (token, *arrays, np.float64(rest), np.int32(1500)))
        return int(token[0])

    assert [found(rest) for rest in (0.0, 0.5, 1.0, 1.5)] == [3, 3, 9, 9]
    assert [found(rest) for rest in (2.0, 3.5, 4.0, 5.0, 5.75)] == [600, 640, 641, 900, 900]
    assert found(6.0) == 900  # past the sum of all
    sums[0] = 2.5
    assert found(2.25) == 9  # past what the piece has
    weights[[10, 902, 1030, 1031]] = 1.0  # in two pieces of 1024, of which a lane has fours
    sums[:2] = 9.0, 2.0
    assert [found(rest, 4) for rest in (0.5, 1.5, 2.5, 6.5, 7.5)] == [3, 9, 10, 900, 902]
    assert [found(rest, 4) for rest in (9.0, 10.0, 11.0)] == [1030, 1031, 1031]
    assert found(8.5, 4) == 902  # past what the piece has


def test_tensors_that_do_not_fit(machine):
    with pytest.raises(ValueError, match=r"params is torch.uint8 \[1, 8\], expected .* 40\]"):
        ids = machine.empty((1,), torch.int32)
        table = machine.empty((1, 8), torch.uint8)
        sample(
            machine.launcher, ids, ids, machine.empty((1, 8), torch.float32), table, ids, ids.long()
        )
