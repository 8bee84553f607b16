"""Weights replaced while serving: in place, between two iterations, all or nothing."""

import ctypes
import json
import mmap
import re
import tempfile
import time
from pathlib import Path
from time import monotonic

import pytest
import torch
from pausing import PausingHost
from safetensors.torch import load_file
from shorthand import request

from gptmanager import (
    REQUEST_METRICS,
    GptManager,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
)
from gptmanager.errors import CallbackError, ConfigError, ManagerDeadError, SleepError
from gptmanager.manager import stall_watch, weight_updates
from gptmanager.manager.watching import Ran
from gptmanager.memory import released_memory
from gptmanager.memory.checkpoint.safetensors_reader import SafetensorsFolder
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.recorder.recording_file import read_recording
from gptmanager.replay import replay
from gptmanager.testing import RecordingCallbacks, ScriptedModel

FOLDER = "examples/tiny_llama"


def never_pausing():
    return PausingHost(lambda *_: False)


@pytest.fixture(scope="module")
def served():
    host = never_pausing()
    options = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=512, tokens_per_block=16, enable_block_reuse=True),
        deterministic=True,
        max_batch_size=4,
    )
    with GptManager(
        FOLDER, ModelType.INFLIGHT_FUSED_BATCHING, optional_params=options, **host.keywords()
    ) as manager:
        host.manager = manager
        yield host, manager


@pytest.fixture(scope="module")
def checkpoint():
    source = SafetensorsFolder(Path(FOLDER))
    return {
        name: torch.cat([piece.clone() for _, piece in source.pieces(name, 1 << 30)])
        for name in source.describe()
    }


def changed(checkpoint):
    generator = torch.Generator().manual_seed(1)
    return {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in checkpoint.items()
    }


NUMBERS = iter(range(1000))


def output(host, prompt=(1, 2, 3, 4, 5), length=8, **more):
    number = next(NUMBERS)
    host.submit(request(number, [*prompt], length, **more))
    return host.final(number, 60).tensors["output_ids"].tolist()


def test_an_update_changes_what_later_requests_generate_and_back(served, checkpoint, monkeypatch):
    host, manager = served
    first = output(host)
    version = manager.weights_version
    waits, runner = [], manager._worker.updates._runner
    # on a device, the host may still compute the new weights
    monkeypatch.setattr(runner, "catch_up", lambda: waits.append(manager.weights_version))
    assert manager.update_weights(changed(checkpoint)) == version + 1
    second = output(host)
    assert second != first
    assert manager.update_weights(iter(checkpoint.items())) == version + 2
    assert output(host) == first
    assert waits == [version, version + 1]


def submit_paused(host, number, prompt, length, at=1):
    """Submit a streaming request. Return when the manager is paused after its response `at`."""
    host.pauses = lambda of_all, of_request, is_final: of_request == at
    host.submit(request(number, [*prompt], length, is_streaming=True))
    while len(host.of(number)) < at:
        time.sleep(0.001)
    host.pauses = lambda *_: False


def versions(response):
    return response.tensors["request_metrics"].tolist()[-2:]


def test_statistics_and_finals_have_the_version_of_the_weights(served, checkpoint):
    host, manager = served
    assert REQUEST_METRICS[-2:] == ("first_weights_version", "weights_version")
    before = manager.weights_version
    running, waiting = next(NUMBERS), next(NUMBERS)
    submit_paused(host, running, [1, 2, 3], 200)
    host.submit(request(waiting, [1, 2, 3], 4))
    version = manager.update_weights(checkpoint)
    manager.resume_generation()
    assert versions(host.final(running, 60)) == [before, version]
    assert versions(host.final(waiting, 60)) == [version, version]
    records = [json.loads(record)["gptmanager"]["weights_version"] for record in host.statistics]
    assert records[-1] == version and before in records


def test_a_manager_that_is_paused_is_not_stuck(served, monkeypatch):
    host, manager = served
    number = next(NUMBERS)
    submit_paused(host, number, [1, 2, 3], 200)
    monkeypatch.setattr(stall_watch, "monotonic", lambda: monotonic() + 60)
    while not manager.health().progressing:  # until the paused loop has looked at the clock
        time.sleep(0.01)
    assert manager.health().num_active == 1 and manager.health().last_step_age_s > 50
    manager.resume_generation()
    host.final(number, 60)


def test_a_wrong_mapping_changes_nothing(served, checkpoint):
    host, manager = served
    first, version = output(host), manager.weights_version
    name = next(iter(checkpoint))
    shape = str([*checkpoint[name].shape])
    new, tied = changed(checkpoint), checkpoint["model.embed_tokens.weight"]
    others = {name: new[name] for name in new if name != "model.embed_tokens.weight"}
    for tensors, text in (
        ({**new, "nothing": torch.zeros(1)}, "tensors are unknown: nothing"),
        (
            {**new, name: torch.zeros(3)},
            f"tensor {name} has shape [3]; the config requires {shape}",
        ),
        ({**new, "lm_head.weight": tied}, "lm_head.weight differs from embedding.weight"),
        ({**others, "lm_head.weight": tied + 1}, "lm_head.weight differs from embedding.weight"),
    ):
        with pytest.raises(ConfigError, match=re.escape(text)):
            manager.update_weights(tensors)
    assert (output(host), manager.weights_version) == (first, version)


@pytest.mark.parametrize("batch_bytes", [1, 1 << 40])  # all tensors are copied, or none
def test_an_iterator_that_fails_half_way_pauses_until_an_update_is_complete(
    served, checkpoint, monkeypatch, batch_bytes
):
    host, manager = served
    first = output(host)

    def failing():
        yield from changed(checkpoint).items()
        raise OSError("the trainer has gone")

    monkeypatch.setattr(weight_updates, "_BATCH_BYTES", batch_bytes)
    with pytest.raises(OSError, match="the trainer"):
        manager.update_weights(failing())
    number = next(NUMBERS)
    host.submit(request(number, [1, 2, 3, 4, 5], 8))
    with pytest.raises(TimeoutError):
        host.final(number, 0.3)
    one = dict([next(iter(checkpoint.items()))])
    with pytest.raises(ConfigError, match="missing"):
        manager.update_weights(iter(one.items()))
    with pytest.raises(ConfigError, match="missing"):
        manager.update_weights(one)
    manager.update_weights(checkpoint)
    assert host.final(number, 60).tensors["output_ids"].tolist() == first


def test_a_pause_keeps_requests_and_their_output(served, checkpoint):
    host, manager = served
    whole = output(host, length=60)
    number = next(NUMBERS)
    manager.pause_generation()
    host.submit(request(number, [1, 2, 3, 4, 5], 60, is_streaming=True))
    with pytest.raises(TimeoutError):
        host.final(number, 0.2)
    manager.resume_generation()
    host.final(number, 60)
    assert (
        sum((r.tensors["output_ids"].flatten().tolist() for r in host.of(number)), [])
        == (whole[0][0][5:])
    )


def test_without_recompute_running_requests_keep_their_keys_and_values(served, checkpoint):
    host, manager = served
    number, seen = next(NUMBERS), []
    submit_paused(host, number, [1, 2, 3], 80)
    manager.watch(seen.append)
    manager.update_weights(checkpoint)
    manager.resume_generation()
    host.final(number, 60)
    manager.unwatch(seen.append)
    assert not any(event.context_rows for event in seen if isinstance(event, Ran))


def test_recompute_gives_the_output_of_the_new_weights_alone(served, checkpoint):
    host, manager = served
    number, prompt, length = next(NUMBERS), (1, 2, 3, 4, 5), 80

    def tokens():
        return sum((r.tensors["output_ids"].flatten().tolist() for r in host.of(number)), [])

    manager.update_weights(changed(checkpoint))
    submit_paused(host, number, prompt, length, at=5)
    manager.update_weights(checkpoint, recompute=True)
    old = tokens()
    manager.resume_generation()
    host.final(number, 60)
    ((whole,),) = output(host, (*prompt, *old), length - len(old))
    assert tokens() == whole[len(prompt) :]
    assert manager.audit().ok


@pytest.mark.parametrize("call", ["sleep", "update_weights"])
def test_a_context_that_is_too_long_to_compute_again_ends_only_its_request(checkpoint, call):
    """Without chunks: prompt and output together exceed the tokens of a step."""
    host = never_pausing()
    options = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=1024), max_num_tokens=16, deterministic=True
    )
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(FOLDER, fused, optional_params=options, **host.keywords()) as manager:
        host.manager = manager
        whole = output(host, prompt=(5, 6), length=12)
        number, short = next(NUMBERS), next(NUMBERS)
        submit_paused(host, number, [1, 2, 3, 4, 5], 400, at=20)
        host.submit(request(short, [5, 6], 12))
        if call == "sleep":
            manager.sleep()
            manager.wake()
        else:
            manager.update_weights(checkpoint, recompute=True)
        manager.resume_generation()
        told = host.final(number, 60).error
        assert told.startswith("CapacityError: the request must compute its ")
        assert told.endswith("at most 16 tokens: set enable_chunked_context")
        assert host.final(short, 60).tensors["output_ids"].tolist() == whole
        assert manager.wait_idle(30) and manager.audit().ok


@pytest.mark.parametrize("options", [{"run_ahead": 1}, {"enable_trt_overlap": True}])
def test_a_recording_with_calls_between_its_iterations_replays(
    checkpoint, tmp_path, monkeypatch, options
):
    """A call finishes the steps in flight, whose results are not those of an iteration."""
    host, path = RecordingCallbacks(), tmp_path / "recording.jsonl"
    kv_cache = KvCacheConfig(max_tokens=1024)
    params = OptionalParams(kv_cache, max_batch_size=2, recording_path=path, **options)
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(FOLDER, fused, optional_params=params, **host.keywords()) as manager:
        host.manager = manager
        loop = manager._worker.loop
        forward = loop.forward

        def hold(schedule):  # a step lasts until the call is made
            while len(host.of(0)) >= 5 and not manager._inbox._questions and not updated:
                time.sleep(0.001)
            return forward(schedule)

        updated = []
        monkeypatch.setattr(loop, "forward", hold)
        host.submit(*(request(i, [1, 2, 3 + i], 60 + i, is_streaming=i == 0) for i in range(4)))
        while len(host.of(0)) < 5:
            time.sleep(0.001)
        manager.update_weights(checkpoint)
        updated.append(True)
        manager.sleep()
        manager.wake()
        manager.update_weights(checkpoint, recompute=True)
        assert manager.wait_idle(60)
    assert not any(host.final(i).error for i in range(4))
    recording = read_recording(path)
    assert any(len(it.results) > 1 for it in recording.iterations)
    assert replay(recording).divergence is None


def test_abort_all_ends_what_is_active_and_nothing_else(served, monkeypatch):
    host, manager = served
    forward = manager._worker.loop.forward

    def hold(schedule):  # a step lasts until the call is made
        while not manager._inbox._questions and not aborted:
            time.sleep(0.001)
        return forward(schedule)

    aborted = []  # filled when the call has been made, because a step may begin after it
    manager.pause_generation()
    numbers = [next(NUMBERS) for _ in range(2)]
    host.submit(*(request(number, [1, 2, 3], 400) for number in numbers))
    monkeypatch.setattr(manager._worker.loop, "forward", hold)
    manager.resume_generation()
    while manager.health().num_active < 2:
        time.sleep(0.001)
    aborted.append(manager.abort_all())
    assert aborted == [2]
    monkeypatch.undo()
    assert all(host.final(n, 60).tensors["finish_reasons"].item() == 5 for n in numbers)
    assert len(output(host)[0][0]) == 13


def test_a_step_that_fails_in_a_call_ends_its_requests(monkeypatch):
    host = PausingHost(lambda of_all, *_: of_all == 1)
    options = OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=512), run_ahead=1)
    with GptManager(
        FOLDER, ModelType.INFLIGHT_FUSED_BATCHING, optional_params=options, **host.keywords()
    ) as manager:
        host.manager = manager
        number = next(NUMBERS)
        host.submit(request(number, [1, 2, 3], 40, is_streaming=True))
        while not host.responses:
            time.sleep(0.001)

        def fail(step):
            monkeypatch.undo()
            raise OSError("the device is lost")

        monkeypatch.setattr(manager._worker.loop.executor, "result", fail)
        with pytest.raises(OSError, match="the device is lost"):
            manager.sleep()
        assert not manager.is_asleep
        manager.resume_generation()
        error = host.final(number, 60).error
        assert error.startswith("StepError: ") and "the device is lost" in error
        assert manager.audit().ok
        assert len(output(host)[0][0]) == 13


@pytest.mark.slow
def test_an_update_leaves_the_file_of_a_mapped_checkpoint_as_it_is(tmp_path, checkpoint):
    folder = convert_checkpoint(FOLDER, tmp_path / "int8", weights_dtype="int8")
    before = [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]
    host = RecordingCallbacks()
    options = OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=512), max_batch_size=4)
    with GptManager(
        folder, ModelType.INFLIGHT_FUSED_BATCHING, optional_params=options, **host.keywords()
    ) as manager:
        host.manager = manager
        first = output(host)
        manager.update_weights(changed(checkpoint))
        assert output(host) != first
    assert before == [path.read_bytes() for path in sorted(folder.glob("*.safetensors"))]


@pytest.mark.parametrize("weights_dtype", [None, "int8", "int4"])
def test_after_an_update_a_manager_is_as_a_new_one(checkpoint, weights_dtype):
    """Also one with quantized weights; embeddings are tied, and an adapter is in use."""
    config = json.loads(Path(FOLDER, "config.json").read_text())
    row = torch.randn(1, 256, generator=torch.Generator().manual_seed(2)) / 4
    adapter = {"lora_task_id": 1, "lora_weights": row, "lora_config": torch.tensor([[1, 0, 1]])}
    options = OptionalParams(
        kv_cache_config=KvCacheConfig(max_tokens=512),
        max_batch_size=2,
        weights_dtype=weights_dtype,
        peft_cache_manager_config=PeftCacheManagerConfig(host_cache_size=1 << 20),
    )

    def outputs(tensors, update=None):
        host = RecordingCallbacks()
        fused = ModelType.INFLIGHT_FUSED_BATCHING
        source = config, tensors
        with GptManager(source, fused, optional_params=options, **host.keywords()) as manager:
            host.manager = manager
            found = [output(host, **adapter)]
            if update is None:
                return [*found, output(host), output(host, lora_task_id=1)]
            manager.update_weights(update)
            return [*found, output(host), output(host, lora_task_id=1)]

    old, *found = outputs(checkpoint, changed(checkpoint))
    new, plain, adapted = outputs(changed(checkpoint))
    assert found == [plain, adapted] and new == adapted != plain and old != new


# Sleep --------------------------------------------------------------------------------------


def test_sleep_pauses_requests_and_wake_lets_them_go_on_as_if_nothing_was(served):
    host, manager = served
    whole = output(host, length=60)
    number, waiting = next(NUMBERS), next(NUMBERS)
    host.submit(request(number, [1, 2, 3, 4, 5], 60, is_streaming=True))
    while not host.of(number):
        pass
    manager.sleep()
    assert manager.is_asleep and manager.audit().ok
    host.submit(request(waiting, [1, 2, 3, 4, 5], 8))
    with pytest.raises(SleepError, match="asleep already"):
        manager.sleep()
    with pytest.raises(TimeoutError):
        host.final(waiting, 0.2)
    manager.wake()
    with pytest.raises(SleepError, match="not asleep"):
        manager.wake()
    host.final(number, 60)
    host.final(waiting, 60)
    found = sum((r.tensors["output_ids"].flatten().tolist() for r in host.of(number)), [])
    assert found == whole[0][0][5:] and manager.audit().ok


def resident_bytes(tensors):
    """How much memory the whole pages of these tensors have."""
    size, total = mmap.PAGESIZE, 0
    for tensor in tensors:
        first, end = -(-tensor.data_ptr() // size), (tensor.data_ptr() + tensor.nbytes) // size
        if first < end:
            pages = (ctypes.c_ubyte * (end - first))()
            start, length = ctypes.c_void_p(first * size), ctypes.c_size_t(size * (end - first))
            assert ctypes.CDLL(None).mincore(start, length, pages) == 0
            total += size * sum(page & 1 for page in pages)
    return total


def test_the_system_gets_the_memory_of_weights_and_cache_back(served):
    host, manager = served
    first = output(host)
    runner = manager._worker.updates._runner
    tensors = [*runner.model.weights.memory(keeps=True)[0], *runner.kv_pool.memory]
    before = resident_bytes(tensors)
    assert before > 0.9 * runner.model.nbytes
    for keeps in (False, True):
        manager.sleep(keep_weights=keeps)
        assert resident_bytes(tensors) == 0
        if not keeps:
            manager.wake()
            manager.update_weights(load_file(f"{FOLDER}/model.safetensors"))
    manager.wake()
    assert output(host) == first


@pytest.mark.parametrize("keeps", [True, False])
def test_the_weights_of_a_model_object_stay_in_sleep(keeps):
    """They are the host's."""
    host, model = RecordingCallbacks(), ScriptedModel(lambda tokens: tokens[-1] + 1)
    options = OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=512), max_batch_size=4)
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(model, fused, optional_params=options, **host.keywords()) as manager:
        first = output(host)
        manager.sleep(keep_weights=keeps)
        assert manager.is_asleep
        manager.wake()
        assert output(host) == first


def test_a_full_disk_leaves_a_manager_awake(served, monkeypatch):
    host, manager = served
    first, file = output(host), open("/dev/full", "wb", buffering=0)
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: file)
    with pytest.raises(ConfigError, match=r"cannot be written to .*keep_weights=False"):
        manager.sleep()
    assert file.closed  # it leaves the disk its space
    assert not manager.is_asleep and output(host) == first


@pytest.mark.parametrize("keeps", [True, False])
def test_memory_that_is_released_in_part_leaves_a_manager_awake(served, monkeypatch, keeps):
    host, manager = served
    first, release, released = output(host), released_memory._release_pages, []

    def release_some(tensor):
        if len(released) == 5:
            raise MemoryError("no memory for this call")
        released.append(tensor)
        release(tensor)

    with monkeypatch.context() as patch:
        patch.setattr(released_memory, "_release_pages", release_some)
        with pytest.raises(MemoryError):
            manager.sleep(keep_weights=keeps)
    assert not manager.is_asleep
    if not keeps:
        assert not manager._worker.updates.can_run  # some weights are lost
        manager.update_weights(load_file(f"{FOLDER}/model.safetensors"))
    assert output(host) == first


def test_a_machine_without_a_temporary_folder_leaves_a_manager_awake(served, monkeypatch):
    """`tempfile.gettempdir` raises if no folder can be written to."""
    host, manager = served
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_get_default_tempdir", lambda: open("/none/such"))
    with pytest.raises(ConfigError, match=r"written to a temporary folder .*keep_weights=False"):
        manager.sleep()
    assert not manager.is_asleep and output(host)


def test_the_end_of_a_sleeping_manager_is_an_abort():
    host = never_pausing()
    options = OptionalParams(kv_cache_config=KvCacheConfig(max_tokens=512), max_batch_size=4)
    with GptManager(
        FOLDER, ModelType.INFLIGHT_FUSED_BATCHING, optional_params=options, **host.keywords()
    ) as manager:
        host.manager = manager
        submit_paused(host, 1, [1, 2, 3], 400)
        manager.sleep()
        manager.shutdown(drain=True, timeout=20)
        assert host.final(1).error.startswith("ManagerDeadError")
    for call in (manager.sleep, manager.wake, manager.abort_all):
        with pytest.raises(ManagerDeadError, match="the loop has ended"):
            call()


def test_callbacks_must_not_make_these_calls(served):
    host, manager = served
    found = []

    def see(_):
        if not found:
            for call in (manager.sleep, manager.wake, manager.abort_all):
                with pytest.raises(CallbackError, match="cannot be called in a callback"):
                    call()
                found.append(call)

    manager.watch(see)
    output(host)
    manager.unwatch(see)
    assert len(found) == 3


def test_weights_that_sleep_drops_come_back_with_an_update_before_or_after_wake(served, checkpoint):
    host, manager = served
    first = output(host)
    for is_early in (True, False):
        manager.sleep(keep_weights=False)
        if is_early:
            with pytest.raises(ConfigError, match="missing"):
                manager.update_weights({})
            manager.update_weights(iter(checkpoint.items()))
        manager.wake()
        number = next(NUMBERS)
        host.submit(request(number, [1, 2, 3, 4, 5], 8))
        if not is_early:
            with pytest.raises(TimeoutError):
                host.final(number, 0.2)
            manager.update_weights(checkpoint)
        assert host.final(number, 60).tensors["output_ids"].tolist() == first


def test_an_update_of_some_tensors_in_sleep_keeps_the_others(served, checkpoint):
    host, manager = served
    first = output(host)
    manager.sleep()
    manager.update_weights(dict([next(iter(changed(checkpoint).items()))]))
    manager.wake()
    other = output(host)
    manager.update_weights(dict([next(iter(checkpoint.items()))]))
    assert output(host) == first != other
