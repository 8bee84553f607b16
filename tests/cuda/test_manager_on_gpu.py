"""Whole managers on a GPU: what a host can see of them, end to end.

Each body runs on the CPU and on the emulator too, wherever that says anything: what only ever ran
on a machine that few have would not be worth much there.
"""

from __future__ import annotations

import functools
import gc
import json
import threading
from dataclasses import dataclass

import pytest
import torch
from checkpoints import expected_logits, is_greedy, random_model, random_state
from devices import GPU, LLAMA, NO_ADAPTERS, there_is

from gptmanager import (
    CapacitySchedulerPolicy,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    SchedulerConfig,
)
from gptmanager.assembly import device_backend
from gptmanager.assembly.device_backend import DeviceBackend
from gptmanager.cuda.device.device import find_cupy
from gptmanager.errors import ConfigError
from gptmanager.testing import ContractChecker, RecordingCallbacks

NO_EVICT = CapacitySchedulerPolicy.GUARANTEED_NO_EVICT
MAX_UTILIZATION = CapacitySchedulerPolicy.MAX_UTILIZATION
from_tokens = InferenceRequest.from_tokens
pytestmark = [pytest.mark.timeout(180), pytest.mark.every(2)]  # the emulator beside busy neighbors


@pytest.fixture(params=["cpu", "emulator", GPU])
def device(request):
    return there_is(request.param)


@pytest.fixture(params=["emulator", GPU])
def kernel_device(request):
    """Where CUDA kernels run."""
    return there_is(request.param)


@functools.cache
def model():
    return random_model(LLAMA)


@functools.cache
def own_checkpoint():
    return LLAMA, random_state(LLAMA)


@dataclass
class Served:
    """What a manager answered, and told of itself."""

    host: RecordingCallbacks

    def tokens(self):
        return {r.request_id: self.host.output(r.request_id) for r in self.finals}

    @property
    def finals(self):
        return [response for response in self.host.responses if response.is_final]

    def tensors(self, name):
        return {r.request_id: r.tensors[name] for r in self.finals}

    @property
    def records(self):
        return [json.loads(record) for record in self.host.statistics]

    def num_pauses(self):
        return sum(record["Paused Requests"] for record in self.records)


def serve(device, requests, *, beams=1, policy=NO_EVICT, source=None, max_tokens=512, **options):
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    cache = options.pop("cache", None) or KvCacheConfig(max_tokens=max_tokens, tokens_per_block=16)
    options = {"max_batch_size": 4, "peft_cache_manager_config": NO_ADAPTERS, **options}
    with GptManager(
        source or own_checkpoint(),
        ModelType.INFLIGHT_FUSED_BATCHING,
        beams,
        SchedulerConfig(policy),
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        host.return_batch_manager_stats,
        OptionalParams(cache, device=device, **options),
    ) as manager:
        assert manager.wait_idle(120), manager.exception
        assert manager.audit().ok
    checker.check(manager)
    return Served(host)


def prompt(start, length):
    return [(start * 5 + 7 * i) % 90 for i in range(length)]


def greedy(count=4):
    return [from_tokens(i, prompt(i, 3 + 13 * i), 4 + 3 * i) for i in range(1, count + 1)]


def drawn(count=4, **by_name):
    given = {"temperature": 0.9, "runtime_top_k": 30, "runtime_top_p": 0.95, **by_name}
    return [
        from_tokens(i, prompt(i, 3 + 13 * i), 4 + 2 * i, random_seed=i, **given)
        for i in range(1, count + 1)
    ]


def test_greedy_tokens_are_those_of_transformers(device):
    served = serve(device, greedy())
    for request_id, tokens in served.tokens().items():
        length = 3 + 13 * request_id
        assert tokens[:length] == prompt(request_id, length)
        assert len(tokens) == length + 4 + 3 * request_id
        assert is_greedy(model(), tokens[:length], tokens[length:])


@pytest.mark.parametrize(("dtype", "allowed"), [("float32", 2e-4), ("bfloat16", 0.1)])
def test_logits_are_those_of_transformers(device, dtype, allowed):
    """Rounding to bfloat16 costs some of the largest logit, whatever the kernels."""
    requests = [from_tokens(1, prompt(1, 30), 6, return_generation_logits=True)]
    served = serve(device, requests, dtype=dtype)
    tokens, logits = served.tokens()[1], served.tensors("generation_logits")[1][0, 0]
    expected = expected_logits(model(), tokens[:-1])[29:]
    assert (logits - expected).abs().max() <= allowed * expected.abs().max()


def test_penalties_and_bans_are_those_of_the_cpu(kernel_device):
    def requests():
        words = [[5], [6, 7]]
        return [
            *drawn(3, repetition_penalty=1.3, presence_penalty=0.2, bad_words_list=words),
            from_tokens(8, prompt(8, 20), 9, frequency_penalty=0.4, no_repeat_ngram_size=2),
            from_tokens(9, prompt(9, 20), 9),
        ]

    assert serve(kernel_device, requests()).tokens() == serve("cpu", requests()).tokens()


def test_beams_are_those_of_the_cpu(kernel_device):
    def requests():
        wide = {"return_log_probs": True, "beam_width": 3}
        return [from_tokens(i, prompt(i, 10 + i), 7, **wide) for i in range(1, 4)]

    found, expected = (serve(where, requests(), beams=3) for where in (kernel_device, "cpu"))
    for name in ("output_ids", "sequence_length"):
        for request_id, tensor in expected.tensors(name).items():
            assert torch.equal(found.tensors(name)[request_id], tensor)
    for request_id, tensor in expected.tensors("cum_log_probs").items():
        torch.testing.assert_close(
            found.tensors("cum_log_probs")[request_id], tensor, rtol=1e-3, atol=1e-3
        )


def test_recorded_steps_give_the_tokens_of_launched_ones(kernel_device, monkeypatch):
    recorded = serve(kernel_device, [*greedy(3), *seconds()])
    sizes = []

    def no_ladder(most):
        sizes.append(most)
        return ()

    monkeypatch.setattr(device_backend, "ladder", no_ladder)
    launched = serve(kernel_device, [*greedy(3), *seconds()])
    assert sizes == [4] and recorded.tokens() == launched.tokens()


def seconds():
    return [from_tokens(i, prompt(i, 9), 8, temperature=0.8, random_seed=i) for i in (11, 12, 13)]


def test_running_ahead_changes_no_token(device):
    one, other = (serve(device, [*drawn(), *seconds()], run_ahead=ahead) for ahead in (0, 1))
    assert one.tokens() == other.tokens()


@pytest.mark.parametrize("run_ahead", [0, 1])
def test_paused_requests_resume_where_they_were(device, run_ahead):
    def requests():  # that all may start, and cannot all end
        return [from_tokens(i, prompt(i, 10), 42, temperature=0.9, random_seed=i) for i in (1, 2)]

    roomy = serve(device, requests(), run_ahead=run_ahead)
    tight = serve(device, requests(), policy=MAX_UTILIZATION, max_tokens=96, run_ahead=run_ahead)
    assert roomy.num_pauses() == 0 < tight.num_pauses()
    assert tight.tokens() == roomy.tokens()


def test_blocks_return_from_the_host(device):
    def requests():
        shared = [prompt(4, 48), prompt(9, 48), prompt(2, 48)]
        return [from_tokens(i, shared[i % 3] + prompt(i, 5), 6) for i in range(9)]

    block_bytes = 2 * 2 * 16 * 64 * 4
    tiered = KvCacheConfig(
        max_tokens=160,
        tokens_per_block=16,
        enable_block_reuse=True,
        host_cache_size=16 * block_bytes,
        host_swap="always",
    )
    served = serve(device, requests(), cache=tiered, max_batch_size=2)
    reuse = served.records[-1]["gptmanager"]["block_reuse"]
    assert reuse["offloaded_blocks"] > 0 and reuse["onboarded_blocks"] > 0
    assert served.tokens() == serve(device, requests()).tokens()


def test_processors_work_on_the_stream_of_the_model(device):
    """Each one's work is between the logits and the sampling that it changes."""
    seen = []

    def only(request_id, logits, tokens, stream, client_id):
        seen.append((request_id, len(tokens[0]), logits.device.type))
        assert stream.cuda_stream != 0 or logits.device.type == "cpu"
        if logits.device.type == "cuda":
            assert torch.cuda.current_stream().cuda_stream == stream.cuda_stream
        wanted = (request_id * 3 + len(tokens[0])) % 90
        for _ in range(20):  # long enough for a reader that does not wait to be early
            logits.add_(0)
        logits.fill_(-torch.inf)
        logits[..., wanted] = 1.0

    requests = [
        from_tokens(i, prompt(i, 10), 6, logits_post_processor=only if i != 2 else None)
        for i in (1, 2, 3)
    ]
    served = serve(device, requests, logits_post_processor_budget_s=None)
    for request_id in (1, 3):
        wanted = [(request_id * 3 + length) % 90 for length in range(10, 16)]
        assert served.tokens()[request_id][10:] == wanted
    assert is_greedy(model(), prompt(2, 10), served.tokens()[2][10:])
    kind = "cuda" if device == "cuda" else "cpu"
    assert sorted(seen) == [(i, length, kind) for i in (1, 3) for length in range(10, 16)]


def test_a_processor_that_waits_for_its_stream_harms_no_request(device):
    def waiting(request_id, logits, tokens, stream, client_id):
        with stream:
            logits[..., 0] += 1
        stream.synchronize()

    def failing(request_id, logits, tokens, stream, client_id):
        raise OSError("no")

    requests = [
        from_tokens(1, prompt(1, 10), 5, logits_post_processor=waiting),
        from_tokens(2, prompt(2, 10), 5, logits_post_processor=failing),
        from_tokens(3, prompt(3, 10), 5),
    ]
    served = serve(device, requests, logits_post_processor_budget_s=None)
    errors = {response.request_id: response.error for response in served.finals}
    assert not errors[1] and "OSError" in errors[2] and not errors[3]
    assert is_greedy(model(), prompt(3, 10), served.tokens()[3][10:])


def test_several_managers_in_one_process(device):
    """Each has a stream and memory of its own."""
    expected = serve(device, drawn()).tokens()
    found = {}

    def run(number):
        found[number] = serve(device, drawn()).tokens()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert found == {0: expected, 1: expected}


@pytest.mark.parametrize("library", ["torch", "waiting", "cupy"])
def test_a_processor_on_another_stream_is_found(device, library):
    """In debugging: on a GPU its request ends, and says why. There is no other stream elsewhere."""

    def elsewhere(request_id, logits, tokens, stream, client_id):
        if logits.device.type == "cpu":
            return
        if library == "cupy":
            cupy = find_cupy()
            with cupy.cuda.Stream(non_blocking=True):
                cupy.asarray(logits.detach())[...] = 0  # DLPack would let it wait for the model
            return
        other = torch.cuda.Stream()
        if library == "waiting":  # rightly ordered before; what comes after is not
            other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            logits[..., 0] = 9.0

    def own(request_id, logits, tokens, stream, client_id):
        with stream:
            logits[..., 0] -= 1.0

    requests = [
        from_tokens(1, prompt(1, 10), 3, logits_post_processor=elsewhere),
        from_tokens(2, prompt(2, 10), 3, logits_post_processor=own),
        from_tokens(3, prompt(3, 10), 3),
    ]
    watched = {"check_logits_post_processor_streams": True, "logits_post_processor_budget_s": None}
    served = serve(device, requests, **watched)
    errors = {response.request_id: response.error for response in served.finals}
    assert not errors[2] and not errors[3]
    assert ("on another stream" in errors[1]) is (device == "cuda")
    assert is_greedy(model(), prompt(3, 10), served.tokens()[3][10:])


class Greedy:
    """A planning model that is short of memory for batches of more than `limit` tokens."""

    def __init__(self, inner, limit):
        self._inner, self._limit = inner, limit
        self.spec, self.nbytes, self.plan = inner.spec, inner.nbytes, inner.plan
        self.refused = 0

    def forward(self, batch, kv_pool):
        if len(batch.token_ids) > self._limit:
            self.refused += 1
            raise torch.OutOfMemoryError("out of memory: tried to allocate 2.00 GiB")
        return self._inner.forward(batch, kv_pool)


def test_out_of_memory_in_a_step(kernel_device, monkeypatch):
    """The batch runs in parts; whoever fits in none ends alone."""
    made = []
    load = DeviceBackend.load

    def short_of_memory(self, source, params, *others):
        made.append(Greedy(load(self, source, params, *others), 40))
        return made[-1]

    monkeypatch.setattr(DeviceBackend, "load", short_of_memory)
    monkeypatch.setattr(DeviceBackend, "_peak_bytes", lambda *arguments: 0)  # it would not fit
    requests = [from_tokens(i, prompt(i, 20), 6) for i in range(1, 5)]
    served = serve(kernel_device, requests)
    assert made[0].refused > 0
    for response in served.finals:
        assert not response.error
        tokens = served.tokens()[response.request_id]
        assert is_greedy(model(), tokens[:20], tokens[20:])


SCHEDULES = [
    {"max_batch_size": 1},
    {"max_batch_size": 4, "run_ahead": 1},
    {"policy": MAX_UTILIZATION, "max_tokens": 96, "run_ahead": 0},
    {"enable_chunked_context": True, "max_num_tokens": 32, "run_ahead": 1},
]


def test_deterministic_is_bitwise_under_any_schedule(device):
    """Log probabilities tell the last bit."""
    results = [
        serve(device, drawn(return_log_probs=True), deterministic=True, **own) for own in SCHEDULES
    ]
    for other in results[1:]:
        for name in ("output_ids", "output_log_probs", "cum_log_probs"):
            for request_id, tensor in results[0].tensors(name).items():
                assert torch.equal(other.tensors(name)[request_id], tensor), (name, request_id)


def test_an_aborted_manager_answers_everyone_once(device):
    requests = [from_tokens(i, prompt(i, 20), 100) for i in range(1, 7)]
    host = RecordingCallbacks(requests)
    checker = ContractChecker(host.get_inference_requests, host.send_response)
    begun = threading.Event()

    def stats(record):
        begun.set()

    manager = GptManager(
        own_checkpoint(),
        ModelType.INFLIGHT_FUSED_BATCHING,
        1,
        None,
        checker.get_inference_requests,
        checker.send_response,
        host.poll_stop_signal,
        stats,
        OptionalParams(
            KvCacheConfig(max_tokens=1024, tokens_per_block=16), device=device, max_batch_size=6
        ),
    )
    assert begun.wait(60)
    manager.shutdown(drain=False)
    assert manager.wait(60)
    checker.check(manager)
    assert {response.request_id for response in host.responses if response.is_final} == set(
        range(1, 7)
    )


# What only a GPU has ------------------------------------------------------------------------------


@pytest.fixture
def gpu(device_machine):
    """CUDA itself."""
    del device_machine
    return torch.cuda


@pytest.mark.gpu
def test_statistics_have_the_memory_of_the_gpu(gpu):
    served = serve("cuda:0", greedy(2))
    record = served.records[-1]
    assert record["Runtime GPU Memory Usage"] > 2 * 2 * 512 * 64 * 4  # the KV cache alone
    assert record["Runtime Pinned Memory Usage"] > 0


@pytest.mark.gpu
def test_a_manager_gives_its_memory_back(gpu):
    """But for cuBLAS' workspaces, one for each thread and stream: torch keeps them."""
    serve("cuda", greedy(2))
    gc.collect()
    before = gpu.memory_allocated()
    cache_bytes = (1 << 19) * 2 * 2 * 64 * 4
    served = serve("cuda", greedy(2), max_tokens=1 << 19)
    assert served.records[-1]["Runtime GPU Memory Usage"] > cache_bytes
    gc.collect()
    assert gpu.memory_allocated() <= before + cache_bytes // 4


@pytest.mark.gpu
def test_the_kv_cache_is_sized_by_what_is_free(gpu):
    gc.collect()
    gpu.empty_cache()
    free = gpu.mem_get_info()[0]
    cache = KvCacheConfig(tokens_per_block=64, free_gpu_memory_fraction=0.02)
    served = serve("cuda", greedy(2), cache=cache)
    block_bytes = 2 * 2 * 64 * 64 * 4
    num_bytes = served.records[-1]["Max KV cache blocks"] * block_bytes
    assert 0.01 * free < num_bytes <= 0.025 * free  # others on the card come and go


@pytest.mark.gpu
def test_nothing_runs_on_the_default_stream(gpu):
    """A host's own work there is neither waited for nor waits, once a manager is built."""
    serve("cuda", greedy(2))  # what is compiled is compiled
    begun = []

    def keep_busy(request_id, logits, tokens, stream, client_id):
        if not begun:
            with gpu.stream(gpu.default_stream()):
                gpu._sleep(8_000_000_000)  # about four seconds of the device's clock
                begun.append(gpu.current_stream().record_event())

    requests = [*greedy(2), from_tokens(9, prompt(9, 5), 9, logits_post_processor=keep_busy)]
    served = serve("cuda", requests, logits_post_processor_budget_s=None)
    assert len(served.finals) == 3 and not begun[0].query()
    gpu.synchronize()
    assert begun[0].query()


@pytest.mark.gpu
def test_no_memory_at_all_for_a_cache_is_a_config_error(gpu):
    cache = KvCacheConfig(tokens_per_block=64, free_gpu_memory_fraction=1e-12)
    with pytest.raises(ConfigError, match="free_gpu_memory_fraction"):
        serve("cuda", greedy(1), cache=cache)
