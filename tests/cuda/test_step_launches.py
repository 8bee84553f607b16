"""What a recorded step launches: each costs a device microseconds, whatever it does."""

from __future__ import annotations

import functools
import itertools
import re
from collections import Counter

import numpy as np
import pytest
import torch
from devices import LLAMA, checkpoint
from machine_code import LOADS_EARLY
from torch.utils._python_dispatch import TorchDispatchMode

from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.launch import EmulatorLauncher
from gptmanager.cuda.device.streams import EmulatedStream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.sampling.device_sampling import DeviceSampler
from gptmanager.executor.choice.device_chooser import DeviceChooser
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.packed_rows import PackedRows
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.executor.step_in_flight import ChoiceInputs, SamplingRows, StepInFlight
from gptmanager.memory.kv_pool import KvPool, PageShape
from gptmanager.models.model import load_model
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import Row, SequenceStart


class Launches(TorchDispatchMode, EmulatorLauncher):
    """All that a device would launch meanwhile: `names` of kernels, and of torch's operations that
    make or change tensors.
    """

    def __init__(self, has_matmuls):
        TorchDispatchMode.__init__(self)
        EmulatorLauncher.__init__(self, has_matmuls=has_matmuls)
        self.names = []
        self.late = []  # kernels that begin when the one before them has ended
        self.accesses = []  # of each launch: its name, whole numbers that it reads, what it writes

    def kernel(self, program, name, shared_mem=0):
        kernel = super().kernel(program, name, shared_mem)
        if not program.dependent:
            self.late.append(name)

        short = name.partition("<")[0]
        is_written = written_parameters(program, short)

        def launch(grid, block, arguments, shared_mem=0):
            self.names.append(short)
            kernel(grid, block, arguments, shared_mem)
            tensors = [[], []]
            for given, writes in zip(arguments, is_written, strict=False):
                if isinstance(given, torch.Tensor):
                    tensors[writes].append(given)
            reads = [it for it in tensors[False] if not it.is_floating_point()]
            self.accesses.append((short, reads, tensors[True]))

        return launch

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function._schema.name.removeprefix("aten::")
        tensors = [it for it in (*args, result) if isinstance(it, torch.Tensor)]
        memory = [tensor.untyped_storage().data_ptr() for tensor in tensors]
        is_new = isinstance(result, torch.Tensor) and memory[-1] not in memory[:-1]
        if "empty" not in name and (is_new or function._schema.is_mutable):
            self.names.append(name)
            self.accesses.append((name, [], [it for it in tensors if it.numel()]))
        return result


@functools.cache
def written_parameters(program, kernel):
    """Whether the kernel may write to what each parameter points to."""
    source = re.sub("//.*", "", program.path.read_text())
    parameters = re.search(rf"\b{kernel}\(([^)]*)\)", source)[1].split(",")
    return ["*" in it and not it.strip().startswith("const ") for it in parameters]


def overlap(one, other):
    first, second = one.data_ptr(), other.data_ptr()
    return first < second + other.nbytes and second < first + one.nbytes


def new_chooser(tables, launches, uploads, downloads):
    lines = Lines(2)
    place = launches, tables.token_cells.device
    sampler = DeviceSampler(2, 96, tables.tokens, *place, dtype=torch.bfloat16)
    processing = PostProcessing(lines)
    return DeviceChooser(lines, tables, sampler, processing, uploads=uploads, downloads=downloads)


def new_runner(num_layers, has_matmuls=False, chooses=False):
    """Return the runner of a narrow Llama, with its launches and its chooser."""
    config = {**LLAMA, "num_hidden_layers": num_layers}
    launches = Launches(has_matmuls)
    stream = EmulatedStream(launches)
    model = load_model(
        (config, checkpoint(tuple(sorted(config.items(), key=str)))),
        kernels=CudaKernels(launches),
        device=stream.device,
        dtype="bfloat16",
    )
    sizes = {"token_major": True, "device": stream.device, "dtype": torch.bfloat16}
    pool = KvPool([PageShape(1, 64)] * num_layers, 4, 16, **sizes)
    tables = DeviceTables(2, 64, 4, stream.device)
    copies = Uploads(stream), Downloads(stream, 16)
    chooser = new_chooser(tables, launches, *copies) if chooses else None
    runner = DeviceRunner(model, pool, tables, stream, *copies, graph_sizes=(2,), chooser=chooser)
    return runner, launches, chooser


def recorded_step(num_layers, has_matmuls=False, chooses=False):
    """What a recorded step launches."""
    runner, launches, _ = new_runner(num_layers, has_matmuls, chooses)
    graph = runner._generation_steps._plain._graphs[2]
    inputs, logits = graph.inputs, graph.result
    assert logits.dtype is torch.bfloat16  # as the kernels that choose read them
    launches.names.clear()
    with torch.inference_mode(), launches:
        runner._step(inputs)
    assert not launches.late
    return Counter(launches.names)


def launched_choice(**params):
    """What the choice of a token launches behind a recording."""
    launches = Launches(has_matmuls=False)
    stream = EmulatedStream(launches)
    tables = DeviceTables(2, 64, 4, stream.device)
    chooser = new_chooser(tables, launches, Uploads(stream), Downloads(stream, 16))
    params = SamplingParams(**params)
    start = SequenceStart(0, (), 1, params)
    chooser.gathered.load([start])
    chooser.load(start)
    line, position, cell = np.zeros(1, np.int64), np.ones(1, np.int64), np.ones(1, np.int64)
    row = Row(1, 0, 0, 0, 1, True)
    rows = SamplingRows((row,), line, np.arange(2), line, position)
    given = map(torch.from_numpy, (line.astype(np.int32), position, cell))
    with torch.inference_mode():
        logits = torch.arange(96)[None].to(torch.bfloat16)
        inputs = ChoiceInputs(*given)
        if chooser.is_plain(line):
            tokens = torch.zeros(1, dtype=torch.int32)
            chooser.choose_captured(tokens, logits, inputs)
            assert tables.token_cells[1] == tokens[0] == logits.argmax()
            inputs = inputs._replace(tokens=tokens)
        else:
            chooser._sampler.flush(chooser._uploads.upload)
        launches.names.clear()
        with launches:
            step = StepInFlight(None, rows, logits, (), inputs, ())
            chooser.choose(step)
    return Counter(launches.names)


def test_what_a_recorded_step_launches(toolchain):
    """Products, five kernels a layer, and once a step what is small and what follows the logits."""
    one, two = recorded_step(1), recorded_step(2)
    layer = {
        "norm": 2,
        "linear": 4,
        "rope_and_write": 1,
        "generation_attention": 1,
        "activate_gated": 1,
    }
    assert two - one == Counter(layer)
    rest = Counter(["index_select", "to", "locate_tokens", "zeros", "embedding", "norm"])
    rest += Counter(["linear", "copy_"])  # logits, and their way to where the choice finds them
    assert one == rest + Counter(layer)


def test_the_choice_is_one_kernel_at_the_end_of_a_recording(toolchain):
    without, chosen = recorded_step(1), recorded_step(1, chooses=True)
    assert chosen - without == Counter(["sample"]) and not without - chosen


def test_a_recording_chooses_for_its_rows_alone(toolchain):
    """By what has just been loaded; the step's other row is padding."""
    runner, _, chooser = new_runner(1, chooses=True)
    tables, cell = runner.tables, 64
    chooser.load(SequenceStart(1, (), 1, SamplingParams(greedy=False, temperature=3.0, seed=5)))
    tables.write_tokens(1, 0, [7])
    tables.write_blocks(1, 0, [1])
    line, first, length = np.ones(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int32)
    rows = PackedRows(line, np.array([0, 1], np.int32), length, first, line, first, first, 0)
    with torch.inference_mode():
        logits, inputs, _ = runner.run(rows)
        (token,) = chooser._sampler.sample(logits.float(), line, first + 1)
    assert inputs.tokens.tolist() == [token] and token != logits.argmax()
    expected = torch.zeros_like(tables.token_cells)
    expected[cell : cell + 2] = torch.tensor([7, token])
    assert torch.equal(tables.token_cells, expected), "and nobody's is nobody's"
    chooser.load(SequenceStart(1, (), 1, SamplingParams(frequency_penalty=1.0)))
    tables.token_cells[cell + 1] = -1
    with torch.inference_mode():
        assert runner.run(rows).inputs.tokens is None and tables.token_cells[cell + 1] == -1


def test_steps_are_recorded_anew_when_memory_is_restored(toolchain):
    """What was recorded holds addresses in memory that is released, or that moves."""
    runner, _, _ = new_runner(1)
    runner.tables.write_tokens(1, 0, [7])
    runner.tables.write_blocks(1, 0, [1])
    line, first, length = np.ones(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.int32)
    rows = PackedRows(line, np.array([0, 1], np.int32), length, first, line, first, first, 0)

    def logits():
        assert runner._generation_steps.size_for(1) == 2
        with torch.inference_mode():
            return runner.run(rows).logits.clone()

    expected = logits()
    runner.release()
    assert runner._generation_steps.size_for(1) is None
    runner.restore()
    assert torch.equal(logits(), expected)
    before = runner._generation_steps._plain._graphs[2]
    runner.restore()
    assert runner._generation_steps._plain._graphs[2] is not before
    assert torch.equal(logits(), expected)


def test_launches_after_a_cuda_graph(toolchain):
    """The copy of the tokens to the CPU; and all that somebody wants who wants more."""
    assert launched_choice() == Counter(["copy_"])
    launched = launched_choice(repetition_penalty=1.5)
    assert launched == Counter(["to", "adjust", "sample", "copy_"])


@pytest.mark.parametrize("has_matmuls", [False, True])
def test_nothing_is_loaded_early_that_the_launch_before_writes(toolchain, has_matmuls):
    """The device may run both at the same time."""
    runner, launches, _ = new_runner(2, has_matmuls)
    zeros = np.zeros(3, np.int64)
    bounds, lengths = np.array([0, 3], np.int32), np.array([3], np.int32)
    context = PackedRows(
        zeros[:1], bounds, lengths, np.arange(3), zeros, zeros[:1] + 2, zeros[:1], 1
    )
    runner.tables.write_blocks(0, 0, [1])
    with torch.inference_mode(), launches:
        runner._step(runner._generation_steps._plain._graphs[2].inputs)
        runner.run(context)
    early = set()
    for (_, _, written), (kernel, read, _) in itertools.pairwise(launches.accesses):
        if kernel in LOADS_EARLY:
            early.add(kernel)
            assert not any(overlap(*pair) for pair in itertools.product(written, read)), kernel
    assert early == {"rope_and_write", "generation_attention", "context_attention"}


def test_a_step_with_matmuls_as_kernels(toolchain):
    """Four products and four kernels a layer: the activation is a part of its product."""
    one, two = recorded_step(1, has_matmuls=True), recorded_step(2, has_matmuls=True)
    layer = {"norm": 2, "gemv": 4, "rope_and_write": 1, "generation_attention": 1}
    assert two - one == Counter(layer)
    rest = Counter(["index_select", "to", "locate_tokens", "zeros", "embedding", "norm"])
    rest += Counter(["gemv", "copy_"])
    assert one == rest + Counter(layer)
