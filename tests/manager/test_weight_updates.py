"""Weights replaced while serving: in place, between two iterations, all or nothing."""

from pathlib import Path

import pytest
import torch
from shorthand import request

from gptmanager import GptManager, KvCacheConfig, ModelType, OptionalParams
from gptmanager.errors import ConfigError
from gptmanager.memory.safetensors_reader import SafetensorsFolder
from gptmanager.models.conversion import convert_checkpoint
from gptmanager.testing import RecordingCallbacks

FOLDER = "examples/tiny_llama"


@pytest.fixture(scope="module")
def served():
    host = RecordingCallbacks()
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


def test_an_update_changes_what_later_requests_generate_and_back(served, checkpoint):
    host, manager = served
    first = output(host)
    version = manager.weights_version
    assert manager.update_weights(changed(checkpoint)) == version + 1
    second = output(host)
    assert second != first
    assert manager.update_weights(iter(checkpoint.items())) == version + 2
    assert output(host) == first


def test_a_wrong_mapping_changes_nothing(served, checkpoint):
    host, manager = served
    first, version = output(host), manager.weights_version
    name = next(iter(checkpoint))
    for wrong in ({"nothing": torch.zeros(1)}, {name: torch.zeros(3)}):
        with pytest.raises(ConfigError):
            manager.update_weights({**changed(checkpoint), **wrong})
    assert (output(host), manager.weights_version) == (first, version)


def test_an_iterator_that_fails_half_way_pauses_until_an_update_is_complete(served, checkpoint):
    host, manager = served
    first = output(host)

    def failing():
        yield from changed(checkpoint).items()
        raise OSError("the trainer has gone")

    manager._worker.updates._load(manager._worker.updates._weights, {})  # as after a first batch
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


def test_recompute_gives_the_output_of_the_new_weights_alone(served, checkpoint):
    host, manager = served
    before = output(host, length=60)
    number = next(NUMBERS)
    host.submit(request(number, [1, 2, 3, 4, 5], 60))
    manager.update_weights(checkpoint, recompute=True)
    assert host.final(number, 60).tensors["output_ids"].tolist() == before
    assert manager.audit().ok


def test_abort_all_ends_what_is_active_and_nothing_else(served):
    host, manager = served
    manager.pause_generation()
    numbers = [next(NUMBERS) for _ in range(2)]
    host.submit(*(request(number, [1, 2, 3], 400) for number in numbers))
    manager.resume_generation()
    while manager.health().num_active < 2:
        pass
    assert manager.abort_all() == 2
    assert all(host.final(n, 60).tensors["finish_reasons"].item() == 5 for n in numbers)
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
