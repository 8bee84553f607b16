"""Kernels of logits post-processors on a GPU: in the order of its stream, and in CUDA graphs."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from requirements import skip

from gptmanager import RawKernelLogitsPostProcessor
from gptmanager.cuda.device.device import find_cupy
from gptmanager.cuda.device.streams import DeviceStream
from gptmanager.decoding.processors.rows import ProcessedSequence, Rows
from gptmanager.errors import ConfigError
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart

pytestmark = pytest.mark.gpu

SOURCE = """
struct Params { int added; };

extern "C" __global__ void add_last(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    const int slot = slots[blockIdx.x], last = tokens[slot * max_seq_len + lengths[blockIdx.x] - 1];
    float* mine = logits + rows[blockIdx.x] * (long long)vocab_size;
    for (int i = threadIdx.x; i < vocab_size; i += blockDim.x) mine[i] += params[slot].added + last;
}
"""
NUM_LINES, VOCAB_SIZE = 4, 1000


@pytest.fixture
def session():
    try:
        find_cupy()
    except ConfigError as error:
        skip(str(error))
    kernel = RawKernelLogitsPostProcessor(
        SOURCE, "add_last", np.dtype([("added", np.int32)], align=True), block=128
    )
    session = kernel.open(NUM_LINES, DeviceStream("cuda"))
    for line in range(NUM_LINES):
        session.load(line, kernel.bind(added=1000 * line))
    return session


def rows_of(logits, tokens, found):
    index, lines, lengths = np.array(found, dtype=np.int64).reshape(-1, 3).T
    start = SequenceStart(0, (), 1, SamplingParams())
    one = ProcessedSequence(start, RequestProcessor(None, "nobody"))
    there = torch.from_numpy(tokens).cuda()
    return Rows(logits, index, [one] * len(found), lines, lengths, tokens, there)


def expected(before, tokens, found):
    after = before.clone()
    for row, line, length in found:
        after[row] += 1000 * line + int(tokens[line, length - 1])
    return after


STEPS = (
    [(0, 1, 2)],
    [(3, 1, 3), (1, 2, 5), (0, 0, 1), (2, 3, 9)],
    [(2, 2, 6), (0, 1, 4)],
    [],
    [(1, 3, 10)],
)


def test_a_captured_launch_is_replayed_with_other_rows(session):
    tokens = np.arange(40, dtype=np.int32).reshape(4, 10)
    logits = torch.zeros(NUM_LINES + 1, VOCAB_SIZE, device="cuda")  # the last row is nobody's
    first = rows_of(logits, tokens, STEPS[0])
    session.process(first)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        session.launch(logits, first.token_tensor, NUM_LINES)
    for found in STEPS:
        logits.normal_()
        before = logits.cpu()
        session.update(rows_of(logits, tokens, found), spare_row=NUM_LINES)
        graph.replay()
        after = expected(before, tokens, found)
        torch.testing.assert_close(logits.cpu()[:NUM_LINES], after[:NUM_LINES])


def test_it_stays_in_the_order_of_the_stream(session):
    """Neither the copies nor the launch overtake what is before them, or are overtaken."""
    tokens = np.arange(40, dtype=np.int32).reshape(4, 10)
    logits = torch.zeros(NUM_LINES, VOCAB_SIZE, device="cuda")
    session.process(rows_of(logits, tokens, STEPS[1]))
    torch.cuda.synchronize()  # a stream of one's own waits for nothing of the default one
    with torch.cuda.stream(torch.cuda.Stream()):
        logits.zero_()
        after = torch.zeros(NUM_LINES, VOCAB_SIZE)
        torch.cuda._sleep(500_000_000)
        logits += 1  # which it must see
        after += 1
        for step in range(20):
            found = [(row, row, step % 9 + 1) for row in range(NUM_LINES)]
            session.process(rows_of(logits, tokens, found))
            after = expected(after, tokens, found)
        found = logits.cpu()
    torch.testing.assert_close(found, after)
