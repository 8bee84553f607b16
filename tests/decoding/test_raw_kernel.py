"""Kernels as logits post-processors: launches, parameters, compilers; the emulator runs them."""

from __future__ import annotations

import re
import threading

import numpy as np
import pytest
import torch
from logits_requests import END_ID, expected, next_token, output, request, serve

from gptmanager import InferenceRequest, RawKernelLogitsPostProcessor
from gptmanager.callbacks import (
    AllowedTokens,
    BannedTokens,
    ForcedPrefix,
    TemperatureSchedule,
    TokenBias,
    Watermark,
)
from gptmanager.cuda import emulator
from gptmanager.cuda.device import compiler
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.kernel_signature import difference, with_signature
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.decoding.processors.raw_kernel import _Session
from gptmanager.decoding.processors.rows import ProcessedSequence, Rows
from gptmanager.errors import CapacityError, ConfigError
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart

NUM_SLOTS, MAX_SEQ_LEN = 9, 40

SOURCE = """
struct Params { int token; double added; };
static_assert(sizeof(Params) == PARAMS_SIZE, "");

extern "C" __global__ void raise_one(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    const Params& mine = params[slots[blockIdx.x]];
    if (threadIdx.x == 0) logits[rows[blockIdx.x] * vocab_size + mine.token] += (float)mine.added;
}
"""
FIELDS = np.dtype([("token", np.int32), ("added", np.float64)], align=True)


def raise_one(source=SOURCE, **more):
    return RawKernelLogitsPostProcessor(source, "raise_one", FIELDS, **more)


def sequences(processor, bounds, chance):
    """A `PostProcessing` in which some slots have their parameters, and a step's arguments."""
    processing = PostProcessing(Lines(NUM_SLOTS))
    tokens = chance.integers(0, 300, (NUM_SLOTS, MAX_SEQ_LEN)).astype(np.int32)
    slots = chance.permutation(NUM_SLOTS)[: len(bounds)]
    prompt_lens = chance.integers(1, 5, len(bounds))
    for slot, bound, prompt_len in zip(slots, bounds, prompt_lens, strict=True):
        handle = None if bound is None else RequestProcessor(bound)
        processing.start(SequenceStart(int(slot), (), int(prompt_len), SamplingParams(), handle))
    lengths = prompt_lens + chance.integers(0, 6, len(bounds))
    return processing, slots.astype(np.int64), lengths.astype(np.int64), tokens


def processed(processor, bounds, vocab_size):
    chance = np.random.default_rng(5)
    processing, slots, lengths, tokens = sequences(processor, bounds, chance)
    logits = torch.from_numpy(chance.normal(size=(len(bounds), vocab_size)).astype(np.float32))
    before = logits.clone()
    errors = processing.run(logits, list(range(len(bounds))), slots, lengths, tokens)
    assert not errors
    return before.numpy(), logits.numpy()


CASES = {
    "allowed": (lambda: AllowedTokens(8), lambda p: [p.bind([3, 1, 299, 5000]), p.bind([7])]),
    "banned": (lambda: BannedTokens(8), lambda p: [p.bind([3, 1, 299, 5000]), p.bind([])]),
    "bias": (
        lambda: TokenBias(8),
        lambda p: [p.bind({9: 1.5, 2: -2.0, 5000: 1.0}), p.bind({0: 1})],
    ),
    "temperature": (TemperatureSchedule, lambda p: [p.bind(2.0, 0.5, 4), p.bind(1.0, 3.0, 100)]),
    "watermark": (lambda: Watermark(2**32 - 7), lambda p: [p.bind(), p.bind()]),
    "prefix": (lambda: ForcedPrefix(8), lambda p: [p.bind([4, 2, 9]), p.bind([1] * 8)]),
}


@pytest.mark.parametrize("vocab_size", [300, 1000])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(2)
def test_the_kernel_does_what_its_twin_does(case, vocab_size):
    make, bind = CASES[case]
    results = []
    for with_twin in (True, False):
        processor = make()
        if not with_twin:
            processor.twin = None
        bounds = [None, *bind(processor), None, *bind(processor)]
        before, after = processed(processor, bounds, vocab_size)
        np.testing.assert_array_equal(after[[0, 3]], before[[0, 3]])
        assert not np.array_equal(after, before)
        results.append(after)
    np.testing.assert_allclose(results[0], results[1], rtol=1e-6)


def test_a_kernel_runs_in_a_manager():
    kernel = raise_one()
    asked = [
        request(i, logits_post_processor=kernel.bind(token=i + 5, added=1e6) if i < 3 else None)
        for i in range(5)
    ]
    host = serve(asked)
    for one in asked[:3]:
        assert output(host, one) == [one.request_id + 5] * 6
    for one in asked[3:]:
        assert output(host, one) == expected(one.input_ids.tolist(), 6, next_token)


def test_one_launch_a_step_for_all_its_rows():
    launches = []

    def twin(logits, rows, slots, params, lengths, prompt_lengths, tokens, max_seq_len, vocab_size):
        launches.append(len(rows))
        assert tokens.shape == (6, max_seq_len) and logits.shape[1] == vocab_size
        logits[rows, params[slots]["token"]] += 1e6

    byte = np.dtype([("token", np.uint8)])  # a record has fewer bytes than a step has rows
    kernel = RawKernelLogitsPostProcessor(SOURCE, "raise_one", byte, twin=twin)
    asked = [request(i, 3, 4, logits_post_processor=kernel.bind(token=i)) for i in range(3)]
    host = serve(asked)
    assert launches == [3, 3, 3, 3]
    assert [output(host, one) for one in asked] == [[i] * 4 for i in range(3)]


def test_a_recorded_launch_does_the_same_for_other_rows(monkeypatch):
    """A CUDA graph repeats the arguments of one step after those of another were written."""
    processor = raise_one()
    launch = processor.prepare("cpu").result()
    recorded = []
    monkeypatch.setattr(
        "gptmanager.decoding.processors.raw_kernel._Session.process",
        lambda self, rows, process=_Session.process: record(self, rows, process),
    )

    def record(session, rows, process):
        session._launch = lambda *arguments: recorded.append(arguments)
        return process(session, rows)

    bounds = [processor.bind(token=3, added=2.0), None, processor.bind(token=7, added=-1.0)]
    processing, slots, lengths, tokens = sequences(processor, bounds, np.random.default_rng(1))
    logits = torch.zeros(3, 300)
    for order in ([0, 1, 2], [2, 0, 1], [1, 2, 0]):
        processing.run(logits, [0, 1, 2], slots[order], lengths[order], tokens)
        logits.zero_()
        launch(*recorded[0])
        for row, place in enumerate(order):
            expected = np.zeros(300, dtype=np.float32)
            if bounds[place] is not None:
                expected[bounds[place].record["token"]] = bounds[place].record["added"]
            assert np.array_equal(logits[row].numpy(), expected)
    for grid, block, arguments in recorded:
        assert (grid, block) == recorded[0][:2]
        for one, other in zip(arguments, recorded[0][2], strict=True):
            if isinstance(one, torch.Tensor):
                assert one.data_ptr() == other.data_ptr()


# The kernel's buffers -----------------------------------------------------------------------------

WRITES = """
struct Params { int factor; };

extern "C" __global__ void write_history(
    float* logits, const int* rows, const int* slots, const Params* params, const int* lengths,
    const int* prompt_lengths, const int* tokens, int max_seq_len, int vocab_size) {
    const int length = lengths[blockIdx.x], slot = slots[blockIdx.x];
    float* mine = logits + rows[blockIdx.x] * (long long)vocab_size;
    for (int i = threadIdx.x; i < vocab_size; i += blockDim.x) {
        if (i < length) mine[i] = params[slot].factor * tokens[slot * max_seq_len + i];
        if (i == length) mine[i] = prompt_lengths[blockIdx.x];
    }
}
"""
WRITTEN = 12  # the vocabulary; more than there are tokens


def write_history():
    return RawKernelLogitsPostProcessor(
        WRITES, "write_history", np.dtype([("factor", np.int32)], align=True), block=32
    )


def sequence(slot, prompt_len=2, **more):
    start = SequenceStart(slot, (), prompt_len, SamplingParams(), **more)
    return ProcessedSequence(start, RequestProcessor(None, "nobody"))


def rows_of(logits, tokens, found):
    """`found`: (row, line, length) of each; a step's `Rows`."""
    index, lines, lengths = np.array(found, dtype=np.int64).reshape(-1, 3).T
    return Rows(
        logits, index, [sequence(0)] * len(found), lines, lengths, tokens, torch.from_numpy(tokens)
    )


def written(tokens, line, length, factor, prompt_len=2):
    history = [factor * token for token in tokens[line, :length].tolist()]
    return [*history, prompt_len, *[0] * (WRITTEN - length - 1)]


def test_a_launch_of_one_size_can_be_replayed_with_fewer_rows():
    """A CUDA graph launches the same kernel, grid and pointers, with other data in the memory."""
    captured = []
    kernel = write_history()
    session = kernel.open(4, None)
    launch = session._launch

    def capture(grid, block, arguments):
        captured.append((grid, block, arguments))

    tokens = np.arange(40, dtype=np.int32).reshape(4, 10)
    logits = torch.zeros(5, WRITTEN)  # the last row is nobody's
    for line in range(4):
        session.load(line, kernel.bind(factor=line + 1))
    session.update(rows_of(logits, tokens, [(0, 1, 2)]), spare_row=4)
    session._launch = capture
    session.launch(logits, torch.from_numpy(tokens), 4)
    for found in (
        [(0, 1, 2)],
        [(3, 1, 3), (1, 2, 5), (0, 0, 1), (2, 3, 9)],
        [(2, 2, 6), (0, 1, 4)],
        [],
        [(1, 3, 10)],
    ):
        logits.zero_()
        session.update(rows_of(logits, tokens, found), spare_row=4)
        launch(*captured[0])
        expected = np.zeros((4, WRITTEN))
        for row, line, length in found:
            expected[row] = written(tokens, line, length, line + 1)
        np.testing.assert_array_equal(logits[:4], expected)


# In managers --------------------------------------------------------------------------------------


def test_one_kernel_for_all_requests_without_their_own():
    kernel = raise_one()
    everyone = kernel.bind(token=4, added=1e6)
    host = serve([request(1), request(2)], logits_post_processor_batched=everyone)
    assert output(host, request(1)) == output(host, request(2)) == [4] * 6
    broken = raise_one(SOURCE.replace("mine.token]", "mine.tokin]")).bind(token=4, added=1e6)
    with pytest.raises(ConfigError, match="raise_one cannot be compiled"):
        serve([], logits_post_processor_batched=broken)


def test_a_source_that_does_not_compile_ends_its_requests_with_the_line(caplog):
    kernel = raise_one(SOURCE.replace("mine.token]", "mine.tokin]"))
    with pytest.raises(ConfigError, match="raise_one cannot be compiled"):
        kernel.compile()
    host = serve([request(1, logits_post_processor=kernel.bind(token=1, added=1.0)), request(2)])
    error = host.final(1).error
    assert "raise_one cannot be prepared" in error and ":9:" in error and "tokin" in error
    assert output(host, request(2)) == expected(request(2).input_ids.tolist(), 6, next_token)


def test_a_kernel_is_compiled_again_after_the_machine_was_short_of_something(monkeypatch):
    def refuse(*_, **__):
        raise shortage

    kernel, shortage = raise_one(), OSError(28, "No space left on device")
    with monkeypatch.context() as patch:
        patch.setattr(emulator, "Module", refuse)
        with pytest.raises(ConfigError, match="cannot be compiled: .*No space left"):
            kernel.compile()
    shortage = RuntimeError("can't start new thread")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(CapacityError, match="cannot be compiled: can't start new thread"):
            kernel.compile()
    kernel.compile()


OTHER_PARAMETERS = [
    ("const int* lengths,", "", "takes 8 parameters, not 9: it lacks const int[*] lengths"),
    ("int vocab_size", "int vocab_size, int more", "takes 10 parameters, not 9: it has int more"),
    ("const int* lengths", "int lengths", "parameter 5 is declared `int lengths`, expected"),
    ("float* logits", "double* logits", "parameter 1 is declared `double\\* logits`, expected"),
    ("int vocab_size", "long vocab_size", "parameter 9 is declared `long vocab_size`, expected"),
    ("double added", "float added", "parameter 4 .* expected .* of PARAMS_SIZE bytes"),
]


@pytest.mark.parametrize(("declared", "instead", "text"), OTHER_PARAMETERS)
@pytest.mark.every(4)
def test_parameters_that_are_not_passed_are_named_when_it_compiles(declared, instead, text):
    source = SOURCE.replace(declared, instead).replace("static_assert(sizeof", "// (sizeof")
    kernel = raise_one(source)
    with pytest.raises(ConfigError, match=f"raise_one cannot be compiled: raise_one:? ?{text}"):
        kernel.compile()


def test_a_kernel_that_is_not_in_the_source_is_named():
    log = "signature:53:60: error: 'raise_two' was not declared in this scope"
    text = difference(log, SOURCE, "own::raise_two<4>")
    assert text == f"kernel_name = 'own::raise_two<4>' is not in the source: {log}"
    assert difference(log, SOURCE, "raise_one") == ""


def test_a_parameter_given_twice_or_declared_by_a_macro_is_reported():
    source = SOURCE.replace("int vocab_size", "int vocab_size, int vocab_size")
    log = "parameter 10 of a logits post-processor is passed"
    assert "takes 10 parameters, not 9: it repeats one;" in difference(log, source, "raise_one")
    text = difference(log.replace("10", "5"), "DECLARED", "raise_one")
    assert text.startswith("raise_one: parameter 5 differs, expected `const int* lengths`; passed")


def test_parameters_may_be_qualified_and_have_names_of_their_own():
    source = SOURCE.replace("float* logits", "float* __restrict__ logits")
    source = source.replace("int max_seq_len", "const int longest /* (a, b) */")
    source = source.replace("const int* tokens", "const int* const history")
    raise_one(source.replace("const Params* params", "const void* given").replace(
        "params[slots", "((const Params*)given)[slots"
    )).compile()  # fmt: skip


def test_a_twin_takes_what_the_kernel_takes():
    with pytest.raises(
        ConfigError, match="twin = .* these arguments \\(missing a required argument: 'vocab_size'"
    ):
        raise_one(twin=lambda *others, vocab_size: None)


def test_a_kernel_that_leaves_its_memory_ends_its_requests():
    kernel = raise_one(SOURCE.replace("+ mine.token]", "+ mine.token + (1LL << 44)]"))
    host = serve([request(1, logits_post_processor=kernel.bind(token=1, added=1.0)), request(2)])
    assert "logits_post_processor raise_one raised EmulatorError" in host.final(1).error
    assert output(host, request(2)) == expected(request(2).input_ids.tolist(), 6, next_token)


def test_parameters_are_checked_where_they_are_bound():
    kernel = raise_one(twin=lambda *arguments: None)
    with pytest.raises(TypeError, match="raise_one takes token, added; got token"):
        kernel.bind(token=1)
    with pytest.raises(ValueError, match="token = 4294967296 must fit dtype int32"):
        kernel.bind(token=2**32, added=1.0)
    with pytest.raises(ValueError, match="added = 'x'"):
        kernel.bind(token=2, added="x")
    with pytest.raises(TypeError, match="raise_one takes token, added; got nothing"):
        kernel.bind()
    with pytest.raises(ValueError, match="token = 1.5 must fit dtype int32: its dtype is float64"):
        kernel.bind(token=1.5, added=1.0)
    with pytest.raises(ValueError, match="added = None must fit dtype float64"):
        kernel.bind(token=1, added=None)


def test_a_number_that_its_field_cannot_hold():
    fields = np.dtype([("margin", np.float32)], align=True)
    kernel = RawKernelLogitsPostProcessor(SOURCE, "raise_one", fields)
    with pytest.raises(ValueError, match="margin = 1e\\+300 must fit dtype float32: overflow"):
        kernel.bind(margin=1e300)
    assert kernel.bind(margin=-np.inf).record["margin"] == -np.inf


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (np.int32, "is not a structured dtype"),
        ([("a", np.int32), ("b", np.float64)], "create it with align=True"),
    ],
)
def test_a_dtype_that_is_not_a_struct_is_refused(dtype, text):
    with pytest.raises(ConfigError, match=text):
        RawKernelLogitsPostProcessor(SOURCE, "raise_one", dtype)


@pytest.mark.parametrize(
    ("source", "more", "text"),
    [
        (SOURCE, {"block": 2048}, "block = 2048 must be an integer from 1 to 1024"),
        (SOURCE, {"block": 32.0}, "block = 32.0 must be an integer from 1 to 1024"),
        (SOURCE, {"options": "-DX"}, "options must be a sequence of strings, got '-DX'"),
        ("kernels/mine.cu", {}, "source = 'kernels/mine.cu' is a path"),
    ],
)
def test_what_cannot_be_is_refused_where_it_is_written(source, more, text):
    with pytest.raises(ConfigError, match=text):
        raise_one(source, **more)


def test_two_managers_may_share_a_kernel():
    kernel = AllowedTokens()
    for token in (3, 4):
        host = serve([request(1, logits_post_processor=kernel.bind([token]))])
        assert output(host, request(1)) == [token] * 6


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_the_ready_made_ones_under_pauses(run_ahead):
    from gptmanager import CapacitySchedulerPolicy

    prefix, banned = ForcedPrefix(), BannedTokens()
    plain = expected(request(3, 4).input_ids.tolist(), 20, next_token)
    asked = [
        request(1, 4, 20, logits_post_processor=prefix.bind([5] * 12)),
        request(2, 4, 20, logits_post_processor=AllowedTokens().bind([8, END_ID])),
        request(3, 4, 20, logits_post_processor=banned.bind([plain[9]])),
        request(4, 4, 20, logits_post_processor=prefix.bind([6] * 12)),
    ]
    host = serve(
        asked, CapacitySchedulerPolicy.MAX_UTILIZATION, 44, run_ahead=run_ahead, max_num_tokens=16
    )
    pauses = sum(host.final(i).tensors["request_metrics"].tolist()[3] for i in range(1, 5))
    assert pauses > 0
    for one, token in ((asked[0], 5), (asked[3], 6)):
        history = [*one.input_ids.tolist(), *[token] * 12]
        assert output(host, one) == [*[token] * 12, *expected(history, 8, next_token)]
    assert set(output(host, asked[1])) == {8}
    assert output(host, asked[2])[:9] == plain[:9] and plain[9] not in output(host, asked[2])


def test_wrong_bindings_of_the_ready_made_ones():
    with pytest.raises(ValueError, match="token_ids is empty"):
        AllowedTokens().bind([])
    with pytest.raises(ValueError, match="3 different ids are more than max_tokens = 2"):
        BannedTokens(2).bind([1, 2, 3])
    with pytest.raises(ValueError, match="token id -1 is negative"):
        TokenBias().bind({-1: 1.0})
    with pytest.raises(ValueError, match="max_tokens = 0 must be an integer of at least 1"):
        AllowedTokens(0)
    for made in (BannedTokens, TokenBias, ForcedPrefix):
        with pytest.raises(ValueError, match="max_tokens = 0 must be an integer of at least 1"):
            made(0)
    with pytest.raises(TypeError, match="1.5 must be an integer"):
        BannedTokens().bind([1.5])
    with pytest.raises(TypeError, match=r"bias must be a dict .*, got \[3\]"):
        TokenBias().bind([3])
    with pytest.raises(TypeError, match=r"bias\[3\] must be a number, got 'x'"):
        TokenBias().bind({3: "x"})
    with pytest.raises(ValueError, match="key = 'x' must be an integer from 0"):
        Watermark("x")
    for bias in (float("nan"), float("inf"), 1e39):
        with pytest.raises(
            ValueError, match=rf"bias\[3\] = {re.escape(str(bias))} must be at most 3.4028235e\+38"
        ):
            TokenBias().bind({3: bias})
    with pytest.raises(ValueError, match="delta = inf must be a number from -3.4"):
        Watermark(1, delta=float("inf"))
    with pytest.raises(ValueError, match="steps = 0 must be above 0"):
        TemperatureSchedule().bind(1.0, 1.0, 0)
    for value in (0.0, 1e-46, float("inf"), float("nan")):
        with pytest.raises(ValueError, match=f"end = {value} must be from 1e-30 to 1e30"):
            TemperatureSchedule().bind(1.0, value, 2)
    assert Watermark(0).key == 0
    with pytest.raises(ValueError, match="key = -1"):
        Watermark(-1)
    with pytest.raises(ValueError, match="gamma = 1.0"):
        Watermark(1, gamma=1.0)
    with pytest.raises(ValueError, match="3 tokens, more than max_tokens = 2"):
        ForcedPrefix(2).bind([1, 2, 3])
    with pytest.raises(TypeError, match="1.5 must be an integer"):
        ForcedPrefix().bind([1.5])


def test_a_forced_token_outside_of_the_vocabulary_ends_only_its_request():
    prefix = ForcedPrefix()
    asked = [
        request(i, 4, 2, logits_post_processor=prefix.bind([token]))
        for i, token in ((1, 5), (2, 2**31 - 1))
    ]
    host = serve(asked)
    assert output(host, asked[0])[0] == 5
    assert host.final(2).error.startswith("LogitsError")


def test_arguments_of_another_type():
    with pytest.raises(ConfigError, match=r"source must be a string of CUDA C\+\+, got 5"):
        RawKernelLogitsPostProcessor(5, "favor", [("token", np.int32)])
    with pytest.raises(ConfigError, match="params_dtype must be a dtype or a list such as"):
        RawKernelLogitsPostProcessor("", "favor", {"token": "i4"})


def test_a_watermark_is_found_with_its_key():
    watermark = Watermark(key=12345, delta=4.0)
    flat = {"temperature": 1e5, "random_seed": 3}  # any token is as likely as the other

    def sampled(**more):
        host = serve([InferenceRequest.from_tokens(1, [1, 2], 60, **flat, **more)])
        return host.output(1)

    # the logits are divided by the temperature after the watermark
    strong = Watermark(key=12345, delta=1e6)
    marked = sampled(logits_post_processor=strong.bind())
    assert watermark.z_score(marked[1:]) > 4 > watermark.z_score(sampled()[1:])
    assert Watermark(key=54321).z_score(marked[1:]) < 4
    assert watermark.z_score([]) == watermark.z_score([1]) == 0.0
    # of a hundred pairs of equal tokens all are green, or none
    scores = {round(Watermark(key=key, gamma=0.2).z_score([7] * 101), 6) for key in range(40)}
    assert scores == {-5.0, 20.0}


def test_a_temperature_schedule_is_the_temperature():
    asked = {"random_seed": 3, "runtime_top_p": 0.999}
    # scripted logits lie 1e4 apart: only such a temperature lets anything else come
    flat = TemperatureSchedule().bind(1e6, 1e6, 1)
    scheduled = serve([request(1, 3, 30, logits_post_processor=flat, temperature=1.0, **asked)])
    constant = serve([request(1, 3, 30, temperature=1e6, **asked)])
    assert scheduled.output(1) == constant.output(1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.every(3)
def test_the_ready_made_kernels_neither_race_nor_stray(case):
    """In the emulator's check mode, with every array between pages that cannot be read."""
    make, bind = CASES[case]
    processor = make()
    bounds = bind(processor)
    chance = np.random.default_rng(3)
    logits = chance.normal(size=(3, 77)).astype(np.float32)
    params = np.zeros(NUM_SLOTS, dtype=processor.params_dtype)
    slots = np.array([4, 8], dtype=np.int32)
    for slot, bound in zip(slots, bounds, strict=True):
        params[slot] = bound.record
    history = np.array([5, 9], dtype=np.int32), np.array([5, 7], dtype=np.int32)
    tokens = chance.integers(0, 77, (NUM_SLOTS, 9)).astype(np.int32)
    arguments = [logits, np.array([2, 0], dtype=np.int32), slots, params, *history, tokens]
    module = emulator.Module(
        source=processor.source,
        name_expressions=[processor.kernel_name],
        options=processor.options,
        check=True,
        order="reverse",
    )
    there = [emulator.asarray(a.view(np.uint8) if a is params else a) for a in arguments]
    kernel = module.get_function(processor.kernel_name)
    kernel((2,), (processor.block,), (*there, np.int32(9), np.int32(77)))
    processor.twin(*arguments, 9, 77)
    np.testing.assert_allclose(there[0], logits, rtol=1e-6)


def test_a_device_that_there_is_not():
    with pytest.raises(ConfigError, match="device = 'nowhere' must be 'cpu', 'emulator'"):
        raise_one().compile("nowhere")
    with pytest.raises(ConfigError, match="raise_one cannot be compiled"):
        raise_one().compile("cuda:31")


def require_nvrtc():
    try:
        compiler.find_nvrtc()
    except ConfigError as error:
        pytest.skip(f"needs NVRTC: {error}")


@pytest.mark.parametrize(
    ("declaration", "name"),
    [
        ('extern "C" __global__ void add', "add"),
        ("__global__ void add", "add"),
        ("template <int N> __global__ void add", "add<1>"),
    ],
)
def test_a_kernel_is_found_on_both_however_it_is_declared(declaration, name, tmp_path):
    source = declaration + "(float* x) { x[0] += 1; }"
    x = np.zeros(1, np.float32)
    kernel = emulator.Module(source=source, name_expressions=[name]).get_function(name)
    kernel((1,), (1,), (x,))
    assert x[0] == 1
    require_nvrtc()
    made = compiler.compile(source, "sm_90a", [name], cache=tmp_path)
    assert made.lowered[name].encode() in made.code


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_the_ready_made_kernels_compile_for_devices(arch, tmp_path):
    require_nvrtc()
    for make, _ in CASES.values():
        processor = make()
        name = processor.kernel_name
        source = with_signature(processor.source, name)
        made = compiler.compile(source, arch, [name], processor.options, cache=tmp_path)
        assert made.code[:4] == b"\x7fELF"


@pytest.mark.parametrize(("declared", "instead", "text"), OTHER_PARAMETERS)
def test_nvrtc_says_so_too(declared, instead, text, tmp_path):
    require_nvrtc()
    source = SOURCE.replace(declared, instead).replace("static_assert(sizeof", "// (sizeof")
    with pytest.raises(compiler.CompilationError) as caught:
        compiler.compile(with_signature(source, "raise_one"), "sm_90a", ["raise_one"],
                         ["-DPARAMS_SIZE=16"], cache=tmp_path)  # fmt: skip
    assert re.search(text, difference(str(caught.value), source, "raise_one"))
