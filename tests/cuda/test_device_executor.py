"""Managers whose every kernel is a CUDA kernel, beside those of the CPU: the same responses.

On the emulator always; on a GPU where there is one.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from checkpoints import CONFIGS
from devices import LLAMA, WIDE, check_same, checkpoint, finals, prompt, set_token_sizes
from mixed_schedules import from_tokens, mixed

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
)
from gptmanager.assembly.device_backend import DeviceBackend
from gptmanager.callbacks import BannedTokens, TokenBias, Watermark
from gptmanager.config import PromptLookup
from gptmanager.cuda.device.downloads import Downloads
from gptmanager.cuda.device.graphs import StepGraphs
from gptmanager.cuda.device.streams import DeviceStream, EmulatedStream
from gptmanager.cuda.device.uploads import Uploads
from gptmanager.cuda.kernels import CudaKernels
from gptmanager.decoding.processors.raw_kernel import RawKernelLogitsPostProcessor
from gptmanager.decoding.sampling import device_sampling
from gptmanager.decoding.sampling.device_sampling import DeviceSampler
from gptmanager.errors import ConfigError
from gptmanager.executor.choice.device_chooser import DeviceChooser
from gptmanager.executor.choice.prompt_scores import PromptScorer
from gptmanager.executor.device_runner import DeviceRunner
from gptmanager.executor.packed_rows import PackedRows
from gptmanager.executor.sequence_tables import DeviceTables
from gptmanager.memory.adapter_pool import AdapterPool
from gptmanager.memory.cuda_kv_pool import CudaKvPool
from gptmanager.memory.kv_pool import KvPool, PageShape
from gptmanager.models.model import load_model
from gptmanager.peft_cache import CacheSizes

pytestmark = pytest.mark.every(3)

MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION


def several(**by_name):
    return [from_tokens(i, prompt(i, 5 + 9 * i), 2 + i, **by_name) for i in range(1, 6)]


def sampled():
    given = {"temperature": 0.8, "runtime_top_k": 20, "runtime_top_p": 0.9, "random_seed": 7}
    return several(**given)


def adjusted():
    """What the device does alone, by rows that come and go in the same slots."""
    bias = {"embedding_bias": np.linspace(-3, 3, 96, dtype=np.float32)}
    options = [
        {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "return_log_probs": True},
        {"bad_words_list": [[5], [6, 7], [12, 13, 14]], "temperature": 0.9, "random_seed": 4},
        bias,
        {"min_length": 6, "end_id": 3, "no_repeat_ngram_size": 2},
        {"return_log_probs": True, "temperature": 1.5, "random_seed": 9, **bias},
        {"presence_penalty": 0.7, "bad_words_list": [[i] for i in range(20, 60)]},
        {},
    ]
    return [
        from_tokens(i, prompt(i, 4 + 3 * (i % 7)), 4 + i % 5, **options[i % 7]) for i in range(14)
    ]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("requests", "run_ahead"), [(several, 1), (sampled, 1), (mixed, 0), (mixed, 1), (adjusted, 1)]
)
def test_requests_of_all_kinds(device, requests, run_ahead):
    check_same(device, requests, run_ahead=run_ahead)


def test_a_batch_is_adjusted_in_parts(device, monkeypatch):
    monkeypatch.setattr(device_sampling, "_ADJUSTED_AT_ONCE", 2)
    check_same(device, adjusted)


def test_nothing_is_compiled_while_requests_wait(device):
    """All kernels that a manager of that model needs are there before the first request."""
    stream = DeviceStream("cuda") if device == "cuda" else EmulatedStream()
    launcher, asked = stream.launcher, []
    find = launcher.kernel

    def kernel(program, name, shared_mem=0):
        asked.append(name)
        return find(program, name, shared_mem)

    launcher.kernel = kernel
    CudaKvPool(launcher, [PageShape(1, 64)], 4, 16, device=stream.device)
    DeviceSampler(2, 96, np.zeros((2, 8), np.int32), launcher, stream.device)
    names = {"adjust", "sample", "log_probs", "best_of_rows", "copy_blocks"}
    assert {name.partition("<")[0] for name in asked} >= names


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "options",
    [
        {"policy": MAX_UTILIZATION, "run_ahead": 1},
        {"policy": MAX_UTILIZATION, "max_num_tokens": 32},
        {"enable_chunked_context": True, "max_num_tokens": 32, "run_ahead": 1},
        {"enable_trt_overlap": True},
        {"model_type": ModelType.INFLIGHT_BATCHING},
        {"model_type": ModelType.V1, "cache": KvCacheConfig(max_tokens=640)},
        {"deterministic": True, "run_ahead": 1},
    ],
    ids=str,
)
def test_schedules(device, options):
    check_same(device, sampled, **options)


@pytest.mark.every(3)
@pytest.mark.parametrize(
    "config",
    [
        {**CONFIGS["qwen3"], **WIDE},
        {**CONFIGS["gpt2"], "n_embd": 128, "n_head": 2},
        {**CONFIGS["mistral"], **WIDE, "sliding_window": 20},
        {**CONFIGS["qwen2_windows"], **WIDE, "sliding_window": 20},
        {**CONFIGS["llama"]},  # no kernel has heads of 8: the reference computes attention
    ],
    ids=lambda config: config["model_type"],
)
def test_families(device, config):
    check_same(device, several, config=config, run_ahead=1)


def test_an_attention_window_with_a_sink(device):
    window = {"max_attention_window": 24, "sink_token_length": 5}
    cache = KvCacheConfig(max_tokens=400, tokens_per_block=16, **window)
    check_same(device, several, cache=cache, run_ahead=1)


def test_beams(device):
    def requests():
        wide = {"beam_width": 3, "return_log_probs": True}
        return [
            from_tokens(1, prompt(1, 20), 5, **wide),
            from_tokens(2, prompt(2, 9), 5),
            from_tokens(3, prompt(3, 18), 5, beam_width=2, len_penalty=0.5),
            from_tokens(4, prompt(4, 12), 5, beam_width=3, repetition_penalty=1.3, temperature=0.7),
            from_tokens(5, prompt(5, 12), 5, num_return_sequences=2, temperature=1.0),
            from_tokens(6, prompt(6, 12), 8, beam_width=2, stop_words_list=many, end_id=1),
        ]

    many = [[token] for token in range(0, 90, 2)]
    check_same(device, requests, max_beam_width=3, run_ahead=1)


def test_drafts(device):
    def requests():
        text = prompt(4, 12)
        return [from_tokens(i, text * 2 + text[: 4 + i], 9) for i in range(3)]

    check_same(
        device, requests, speculative_decoding_config=PromptLookup(max_draft_tokens=4), run_ahead=1
    )


def test_logits_post_processors_see_the_logits_and_the_whole_history(device):
    histories, places = {}, []

    def forbid(request_id, logits, tokens, stream, client_id):
        with stream:
            histories.setdefault(request_id, []).append(list(tokens[0]))
            places.append(logits.device.type)
            logits[..., tokens[0][-1]] = -torch.inf

    def requests():
        return [
            InferenceRequest.from_tokens(
                i, prompt(i, 12), 6, logits_post_processor=forbid if i % 2 else None
            )
            for i in range(1, 5)
        ]

    found = check_same(device, requests, run_ahead=1, check_logits_post_processor_streams=True)
    for request_id in (1, 3):
        output = found[request_id - 1].tensors["output_ids"][0, 0].tolist()
        once = [output[:length] for length in range(12, 18)]
        assert places[0] != places[-1] == "cpu" and places.count("cpu") == len(places) // 2
        assert histories[request_id] == once * 2  # on the device, then on the CPU


def test_kernels_as_post_processors_run_as_kernels(device):
    """Their twins are the CPU's."""
    banned, twins = BannedTokens(8), []
    banned.twin = lambda *arguments: twins.append(1)
    request = from_tokens(1, prompt(1, 9), 7, logits_post_processor=banned.bind([3, 10, 17]))
    assert not finals([request], device)[0].error and not twins


def test_a_kernel_that_cannot_be_compiled_ends_its_request(device):
    kernel = RawKernelLogitsPostProcessor("nonsense", "nothing", [("it", np.int32)])
    requests = [
        from_tokens(1, prompt(1, 9), 7, logits_post_processor=kernel.bind(it=1)),
        from_tokens(2, prompt(2, 9), 7),
    ]
    one, other = finals(requests, device)
    assert "nothing cannot be compiled" in one.error and not other.error


def test_kernels_as_post_processors_read_the_devices_histories(device):
    banned, bias = BannedTokens(8), TokenBias(8)

    def requests():
        bound = {1: banned.bind([3, 10, 17]), 2: bias.bind({5: 3.0, 9: -2.0}), 4: watermark.bind()}
        return [
            from_tokens(i, prompt(i, 9 + i), 7, logits_post_processor=bound.get(i))
            for i in range(1, 5)
        ]

    watermark = Watermark(5)  # its rule depends on the last token
    check_same(device, requests, run_ahead=1)


def test_reused_blocks_and_the_host_tier(device):
    def requests():
        shared = [prompt(4, 33), prompt(9, 33), prompt(2, 33)]
        return [from_tokens(i, shared[i % 3] + prompt(i, 5), 4) for i in range(9)]

    block_bytes = 2 * 2 * 16 * 64 * 4
    cache = KvCacheConfig(
        max_tokens=128,
        tokens_per_block=16,
        enable_block_reuse=True,
        host_cache_size=8 * block_bytes,
        host_swap="always",
    )
    check_same(device, requests, cache=cache, run_ahead=1)


def test_virtual_tokens(device):
    table = np.random.default_rng(0).standard_normal((6, 64)).astype(np.float32)

    def requests():
        tokens = [96, 97, 98, *prompt(3, 9), 99, 4]
        own = {"prompt_embedding_table": table, "prompt_vocab_size": 6}
        others = [from_tokens(i, prompt(i, 9), 6) for i in (2, 3)]
        return [from_tokens(1, tokens, 6, **own), *others]

    # three rows run as a recording of four, whose padding reads none of those tokens
    check_same(device, requests, run_ahead=1)


def test_virtual_tokens_are_not_drafts(device):
    table = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    ban = np.where(np.arange(96) == 4, 0, -np.inf).astype(np.float32)

    def requests():
        tokens = [96, 97, 4, 96, 97, 4, 4, 96, 97]
        own = {"prompt_embedding_table": table, "embedding_bias": ban}
        return [from_tokens(1, tokens, 6, **own)]

    lookup = PromptLookup(max_ngram=1, min_ngram=1)
    check_same(device, requests, speculative_decoding_config=lookup)


def test_stops_and_cancelled_requests_leave_no_trace(device):
    """A slot is given away while the tokens of who had it are still on their way."""

    def requests():
        return [
            from_tokens(i, prompt(i, 6 + i), 3 + i, stop_words_list=[[w] for w in range(0, 90, 4)])
            for i in range(12)
        ]

    check_same(device, requests, run_ahead=1)


@pytest.mark.every(2)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_models_run(device, dtype):
    for final in finals(several(), device, dtype=dtype, run_ahead=1):
        assert not final.error
        assert final.tensors["finish_reasons"].tolist() == [[3]]


def test_outputs_are_bitwise_the_same_under_any_schedule(device):
    """With `deterministic`, log probabilities tell the last bit."""

    def requests():
        return several(temperature=1.0, random_seed=5, return_log_probs=True)

    alone = finals(requests(), device, deterministic=True)
    tight = KvCacheConfig(max_tokens=112, tokens_per_block=16)
    other = finals(
        requests(),
        device,
        deterministic=True,
        cache=tight,
        policy=MAX_UTILIZATION,
        max_num_tokens=48,
        run_ahead=1,
    )
    for one, two in zip(alone, other, strict=True):
        for name in ("output_ids", "output_log_probs", "cum_log_probs"):
            assert torch.equal(one.tensors[name], two.tensors[name])


# The parts ----------------------------------------------------------------------------------------


def test_which_steps_are_recorded_and_which_choose_on_the_device(device, monkeypatch):
    set_token_sizes(monkeypatch)
    replays, chosen = [], []
    run, enqueue = StepGraphs.run, DeviceChooser._enqueue

    def spy(self, size, arrays):
        replays.append(size)
        return run(self, size, arrays)

    def spy_on_choice(self, rows, *rest):
        chosen.append(len(rows.rows))
        return enqueue(self, rows, *rest)

    monkeypatch.setattr(StepGraphs, "run", spy)
    monkeypatch.setattr(DeviceChooser, "_enqueue", spy_on_choice)
    finals([from_tokens(i, prompt(i, 9), 5) for i in range(3)], device)
    assert replays == [4] * 4 and chosen == [3], "of the contexts; recordings choose for the rest"
    replays.clear()
    chosen.clear()
    finals([from_tokens(1, prompt(1, 9), 5, repetition_penalty=1.5)], device)
    assert replays == [1] * 4 and chosen == [1] * 5  # penalties, too
    replays.clear()
    chosen.clear()
    finals([from_tokens(1, prompt(1, 9), 5, beam_width=2)], device, max_beam_width=2)
    assert chosen == [1] * 5 and replays == [2] * 4
    replays.clear()
    chosen.clear()
    finals([from_tokens(1, prompt(1, 9), 5, return_generation_logits=True)], device)
    assert chosen == [1] * 5


def test_a_recorded_step_takes_one_copy_to_the_device(device, monkeypatch):
    copies = []
    fill = Uploads.fill

    def spy(self, *arguments):
        copies.append(1)
        fill(self, *arguments)

    monkeypatch.setattr(Uploads, "fill", spy)
    counts = []
    for num_tokens in (3, 6):
        copies.clear()
        finals([from_tokens(1, prompt(1, 8), num_tokens)], device, run_ahead=1)
        counts.append(len(copies))
    assert counts[1] == counts[0] + 3


def test_tables_on_the_device_follow_those_of_the_cpu():
    stream = EmulatedStream()
    uploads = Uploads(stream)
    tables = DeviceTables(4, 10, 3, stream.device)
    random = np.random.default_rng(0)
    for _ in range(200):
        for _ in range(random.integers(0, 4)):
            line, first = random.integers(0, 4), random.integers(0, 8)
            tables.write_tokens(line, first, random.integers(1, 99, 10 - first).tolist())
            tables.write_blocks(line, first % 3, random.integers(1, 99, 1).tolist())
        tables.flush(uploads.upload)
        if random.random() < 0.3:
            tables.fork(1, random.integers(0, 3, 3).tolist(), 10)
            tables.write_tokens(2, 9, [5])
            tables.flush(uploads.upload)
        assert np.array_equal(tables.token_tensor.numpy(), tables.tokens)
        assert np.array_equal(tables.block_tensor.numpy(), tables.blocks)
    lines, positions = np.array([0, 3, 3]), np.array([2, 9, 10])
    assert tables.cells(lines, positions).tolist() == [2, 39, -1]


def test_tables_that_had_no_memory_to_travel_do_so_later():
    stream = EmulatedStream()
    tables = DeviceTables(4, 10, 3, stream.device)
    tables.write_tokens(1, 2, [5, 6])
    tables.fork(1, [0, 0], 4)
    tables.write_blocks(3, 0, [7])

    def short(arrays):
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        tables.flush(short)
    tables.flush(Uploads(stream).upload)
    assert np.array_equal(tables.block_tensor.numpy(), tables.blocks)
    assert tables.token_tensor[1].tolist() == tables.tokens[1].tolist()


def test_a_buffer_is_written_to_again_when_its_copy_has_run():
    class SlowEvent:
        waits = 0

        def record(self):
            pass

        def synchronize(self):
            SlowEvent.waits += 1

    stream = EmulatedStream()
    stream.event = SlowEvent
    uploads = Uploads(stream)
    for i in range(50):
        arrays = [
            np.arange(i, dtype=np.int32),
            np.full((2, i % 3), i, dtype=np.int64),
            np.zeros((0, 4), dtype=np.int32),
        ]
        for tensor, array in zip(uploads.upload(arrays), arrays, strict=True):
            assert np.array_equal(tensor.numpy(), array)
    large = np.arange(100_000)
    assert np.array_equal(uploads.upload([large])[0].numpy(), large)
    assert SlowEvent.waits == 51


def test_the_largest_step_runs_with_one_block(device):
    stream = DeviceStream("cuda") if device == "cuda" else EmulatedStream()
    model = load_model(
        (LLAMA, checkpoint(tuple(sorted(LLAMA.items(), key=str)))),
        kernels=CudaKernels(stream.launcher),
        device=stream.device,
    )
    pool = KvPool([PageShape(1, 64)] * 2, 1, 16, token_major=True, device=stream.device)
    tables = DeviceTables(1, 160, 10, stream.device)
    runner = DeviceRunner(model, pool, tables, stream, Uploads(stream), Downloads(stream, 8))
    rows = []

    def forward(batch, pool, forward=model.forward):
        logits = forward(batch, pool)
        rows.append((len(batch.token_ids), len(logits)))
        return logits

    model.forward = forward
    runner.run_largest(350, 4)
    runner.run_largest(3, 4)
    stream.synchronize()
    assert rows == [(350, 4), (3, 3)]


def emulated_runner():
    stream = EmulatedStream()
    source = (LLAMA, checkpoint(tuple(sorted(LLAMA.items(), key=str))))
    model = load_model(source, kernels=CudaKernels(stream.launcher), device=stream.device)
    pool = KvPool([PageShape(1, 64)] * 2, 1, 16, token_major=True, device=stream.device)
    tables = DeviceTables(1, 160, 10, stream.device)
    return DeviceRunner(model, pool, tables, stream, Uploads(stream), Downloads(stream, 8))


@pytest.mark.parametrize("normalized", [False, True])
def test_prompts_are_scored_as_on_the_cpu(normalized):
    """Passes of different numbers of tokens."""
    runner, on_cpu = emulated_runner(), PromptScorer(96)
    for num_tokens in (3, 5):
        logits = torch.randn(num_tokens, 96, generator=torch.Generator().manual_seed(num_tokens))
        targets = np.arange(num_tokens)
        expected = on_cpu.score(logits.clone(), targets, 2, normalized=normalized)
        with torch.inference_mode():
            found = runner.score(logits, targets, 2, normalized)
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, check_dtype=False)


def test_logits_of_a_dtype_that_no_kernel_reads_become_float32():
    runner = emulated_runner()
    model = runner.model
    tokens, one = np.arange(3), np.zeros(1, dtype=np.int64)
    starts = np.array([0, 3], dtype=np.int32)
    rows = PackedRows(one, starts, starts[1:], tokens, np.zeros_like(tokens), tokens[2:], one, 1)
    with torch.inference_mode():
        expected = runner.run(rows).logits.clone()
        model.forward = lambda batch, pool, forward=model.forward: forward(batch, pool).double()
        found = runner.run(rows).logits
    assert found.dtype is torch.float32 and torch.equal(found, expected)


def test_memory_includes_the_tables_and_the_pages_of_adapters():
    stream = EmulatedStream()
    source = (LLAMA, checkpoint(tuple(sorted(LLAMA.items(), key=str))))
    model = load_model(source, kernels=CudaKernels(stream.launcher), device=stream.device)
    pool = KvPool([PageShape(1, 64)] * 2, 1, 16, token_major=True, device=stream.device)
    adapters = AdapterPool(CacheSizes(64, 2, 3, 4, 8), 1, torch.float32, stream.device)
    parts = (model, pool, DeviceTables(1, 160, 10, stream.device), stream, Uploads(stream))
    found = [
        DeviceRunner(*parts, Downloads(stream, 8), adapter_pool=own).memory.gpu
        for own in (None, adapters)
    ]
    assert found[0] == model.nbytes + pool.nbytes + 4 * (160 + 1 + 10)  # the tables' int32
    assert found[1] - found[0] == adapters.nbytes > 0


class DelayedStream(EmulatedStream):
    """`pending` runs when something waits for this thread's current stream."""

    def catch_up(self):
        self.pending()


def test_weights_that_a_host_is_still_computing_are_waited_for():
    state = checkpoint(tuple(sorted(LLAMA.items(), key=str)))
    unready = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    stream, params = DelayedStream(), OptionalParams()
    stream.pending = lambda: [unready[name].copy_(tensor) for name, tensor in state.items()]
    model = DeviceBackend(stream, params).load((LLAMA, unready), params)
    found = model.weights.tensor("final_norm.weight")
    assert torch.equal(found, state["model.norm.weight"])


class CountedStream(EmulatedStream):
    """Each run counts as many bytes as the largest batch of the model in it has rows."""

    def peak_bytes(self, run):
        self.largest = 0
        run()
        return self.largest << 20


@pytest.mark.parametrize(
    ("cuda_graphs", "sizes", "is_capturable"),
    [(True, (), True), (True, (16, 30), True), (True, (30,), False), (False, (30,), True)],
)
def test_what_is_recorded_counts_before_the_cache_takes_the_rest(
    toolchain, cuda_graphs, sizes, is_capturable, monkeypatch
):
    set_token_sizes(monkeypatch, *sizes)
    stream = CountedStream()
    params = OptionalParams(max_batch_size=9, max_num_tokens=40, cuda_graphs=cuda_graphs)
    backend = DeviceBackend(stream, params)
    model = backend.load((LLAMA, checkpoint(tuple(sorted(LLAMA.items(), key=str)))), params)

    def forward(batch, pool, forward=model.forward):
        stream.largest = max(stream.largest, len(batch.token_ids))
        return forward(batch, pool)

    def plan(starts, lengths, num_context_rows, fixed=0, plan=model.plan):
        may_plan = is_capturable or not fixed
        return plan(starts, lengths, num_context_rows, fixed) if may_plan else ()

    model.forward, model.plan = forward, plan
    marks = 2 * 9 * 96 * 4
    recorded = (
        max(24, *sizes[1:], 0) if cuda_graphs and is_capturable else 0
    )  # graphs for 18 beams, the next size of the ladder
    free = stream.free_bytes() - marks - (40 + recorded << 20)
    assert backend.memory_budget(model, params, 2).free_bytes == free


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda0", ""])
def test_a_device_that_there_is_not_is_refused_by_name(name):
    with pytest.raises(ConfigError, match="OptionalParams.device"):
        GptManager(
            None, ModelType.V1, 1, None, list, print, optional_params=OptionalParams(device=name)
        )


def test_without_cuda_graphs_nothing_is_recorded(device, monkeypatch):
    def record(graphs, *rest):
        raise AssertionError("recorded")

    monkeypatch.setattr(StepGraphs, "record", record)

    def requests():
        return [InferenceRequest.from_tokens(i, prompt(i, 12), 6) for i in range(1, 4)]

    check_same(device, requests, cuda_graphs=False)
    with pytest.raises(AssertionError, match="^recorded"):
        finals(requests(), device)
