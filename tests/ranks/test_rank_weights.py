"""Weights replaced and memory released on several ranks: on all of them, or on none."""

import asyncio
import time
from pathlib import Path

import pytest
import torch
from pausing import PausingHost
from rank_hosts import TINY, serving
from rank_links import at_once, outcome
from safetensors.torch import load_file
from shorthand import request

from gptmanager.config import FinishReason
from gptmanager.errors import ConfigError, RankError, SleepError
from gptmanager.lifecycle.state import ManagerState
from gptmanager.testing import RecordingCallbacks

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture(scope="module")
def checkpoint():
    return {k: v for file in Path(TINY).glob("*.safetensors") for k, v in load_file(file).items()}


def changed(checkpoint, sign):
    generator = torch.Generator().manual_seed(1)
    return {
        name: (tensor + sign * 0.05 * torch.randn(tensor.shape, generator=generator)).to(
            tensor.dtype
        )
        for name, tensor in checkpoint.items()
    }


@pytest.fixture
def timeout_s():
    return 30.0  # a rank of a busy machine may be silent for a while


# for tests that wait for the timeout
short_timeout = pytest.mark.parametrize("timeout_s", [1.0], ids="timeout of {} s".format)


@pytest.fixture
def two(monkeypatch, timeout_s):
    numbers = iter(range(100))
    with serving(monkeypatch, 2, parallel={"timeout_s": timeout_s}) as it:

        def output(length=8):
            number = next(numbers)
            it.host.submit(request(number, PROMPT, length))
            return it.host.final(number, 60).tensors["output_ids"].tolist()

        yield it, output


def on_all(found, call):
    """What each rank's call returns, or the error that it raises."""
    return at_once(lambda rank: outcome(lambda: call(rank, found.managers[rank])), range(2))


@short_timeout
def test_an_update_and_sleep_happen_on_all_ranks(two, checkpoint):
    it, output = two
    first = output()
    assert on_all(it, lambda _, one: one.update_weights(changed(checkpoint, 1))) == [1, 1]
    assert output() != first
    long = request(90, PROMPT, 60, is_streaming=True)
    it.host.submit(long)
    while not it.host.of(90):
        pass
    assert on_all(it, lambda _, one: one.sleep()) == [None] * 2
    assert all(isinstance(e, SleepError) for e in on_all(it, lambda _, one: one.sleep()))
    time.sleep(1.3)  # longer than timeout_s, with an active request
    updated = on_all(it, lambda _, one: one.update_weights(iter(checkpoint.items())))
    assert updated == [2, 2]
    assert on_all(it, lambda _, one: one.wake()) == [None] * 2
    it.host.final(90, 60)
    assert output() == first
    assert on_all(it, lambda _, one: one.abort_all()) == [0, 0]
    assert [one.audit().ok for one in it.managers] == [True] * 2


def test_what_fails_on_one_rank_fails_on_all(two, checkpoint):
    it, output = two
    first = output()
    name = next(iter(checkpoint))
    wrong = {**changed(checkpoint, 1), name: torch.zeros(3)}
    found = on_all(it, lambda rank, one: one.update_weights(wrong if rank else checkpoint))
    assert type(found[0]) is RankError and type(found[1]) is ConfigError
    assert str(found[1]) in str(found[0]) and f"tensor {name} has shape [3]" in str(found[1])
    assert output() == first

    def failing():
        yield from checkpoint.items()
        raise OSError("the trainer has gone")

    def update(rank, one):
        return one.update_weights(failing() if rank else iter(checkpoint.items()))

    found = on_all(it, update)
    assert type(found[0]) is RankError and "rank 1 failed: OSError: the trainer" in str(found[0])
    number = 80
    it.host.submit(request(number, PROMPT, 8))
    with pytest.raises(TimeoutError):
        it.host.final(number, 0.3)
    assert on_all(it, lambda _, one: one.update_weights(checkpoint)) == [1, 1]
    assert it.host.final(number, 60).tensors["output_ids"].tolist() == first


@short_timeout
def test_a_call_that_another_rank_does_not_make_changes_nothing(two, checkpoint):
    it, output = two
    first = output()
    text = "must be called on all ranks: rank 1 has not called it within timeout_s = 1$"
    with pytest.raises(RankError, match=text):
        it.managers[0].update_weights(changed(checkpoint, 1))
    found = on_all(it, lambda rank, one: one.sleep() if rank else one.update_weights(checkpoint))
    assert ["rank 1 called sleep" in str(error) for error in found] == [True] * 2
    assert output() == first
    assert [one.state for one in it.managers] == [ManagerState.RUNNING] * 2


def failing_once(monkeypatch, runner, name):
    """Make the method raise on its first call."""

    def fail(*_):
        monkeypatch.undo()
        raise MemoryError("planted")

    monkeypatch.setattr(runner, name, fail)


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.every(2)
def test_memory_that_one_rank_cannot_release_or_allocate_leaves_all_alike(two, rank):
    it, output = two
    first = output()
    it.host.submit(request(90, PROMPT, 60, is_streaming=True))
    while not it.host.of(90):
        pass
    for name in ("sleep", "wake"):
        runner = it.managers[rank]._worker.updates._runner
        with pytest.MonkeyPatch.context() as patch:
            failing_once(patch, runner, "release" if name == "sleep" else "restore")
            found = on_all(it, lambda _, one, name=name: getattr(one, name)())
        assert type(found[rank]) is MemoryError and type(found[1 - rank]) is RankError
        assert [one.is_asleep for one in it.managers] == [name == "wake"] * 2
        assert on_all(it, lambda _, one, name=name: getattr(one, name)()) == [None] * 2
    it.host.final(90, 60)
    assert output() == first
    assert [one.audit().ok for one in it.managers] == [True] * 2


@short_timeout
def test_abort_all_ends_requests_on_all_ranks_or_on_none(monkeypatch, timeout_s):
    hosts = [PausingHost(lambda of_all, of_request, _: of_request == 1), RecordingCallbacks()]

    def started(it, number):
        it.host.submit(request(number, PROMPT, 40, is_streaming=True))
        while not it.host.of(number):
            pass

    def reason(it, number):
        it.managers[0].resume_generation()
        return it.host.final(number, 60).tensors["finish_reasons"].item()

    with serving(monkeypatch, 2, hosts, parallel={"timeout_s": timeout_s}) as it:
        started(it, 1)
        text = "abort_all must be called on all ranks: rank 1 has not called it within timeout_s"
        with pytest.raises(RankError, match=text):
            it.managers[0].abort_all()
        found = on_all(it, lambda rank, one: one.sleep() if rank else one.abort_all())
        assert ["rank 1 called sleep" in str(error) for error in found] == [True] * 2
        assert reason(it, 1) == FinishReason.LENGTH
        started(it, 2)
        assert on_all(it, lambda _, one: one.abort_all()) == [1, 1]
        assert reason(it, 2) == FinishReason.CANCELLED
        started(it, 3)
        assert reason(it, 3) == FinishReason.LENGTH
        assert [one.state for one in it.managers] == [ManagerState.RUNNING] * 2


@pytest.mark.parametrize("restores", range(2), ids="rank {} cannot restore".format)
@pytest.mark.parametrize("releases", range(2), ids="rank {} cannot release".format)
@pytest.mark.every(3)
def test_ranks_that_can_neither_release_nor_restore_all_stay_asleep(two, releases, restores):
    it, output = two
    first = output()
    runners = [one._worker.updates._runner for one in it.managers]
    with pytest.MonkeyPatch.context() as one, pytest.MonkeyPatch.context() as other:
        failing_once(one, runners[releases], "release")
        failing_once(other, runners[restores], "restore")
        found = on_all(it, lambda _, one: one.sleep())
    assert type(found[restores]) is MemoryError and type(found[1 - restores]) is RankError
    assert [one.is_asleep for one in it.managers] == [True] * 2
    assert on_all(it, lambda _, one: one.wake()) == [None] * 2
    assert output() == first


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.every(2)
def test_weights_that_one_rank_has_dropped_are_missing_on_all(two, checkpoint, rank):
    it, output = two
    first = output()
    with pytest.MonkeyPatch.context() as patch:
        failing_once(patch, it.managers[rank]._worker.updates, "_release_weights")
        found = on_all(it, lambda _, one: one.sleep(keep_weights=False))
    assert type(found[rank]) is MemoryError and type(found[1 - rank]) is RankError
    assert [one.is_asleep for one in it.managers] == [False] * 2
    partial = dict([*checkpoint.items()][:1])
    for error in on_all(it, lambda _, one: one.update_weights(partial)):
        assert isinstance(error, ConfigError), error
    assert on_all(it, lambda _, one: one.update_weights(checkpoint)) == [1] * 2
    assert output() == first


def test_an_exception_of_any_kind_in_the_tensors_of_one_rank_is_reported_to_the_others(
    two, checkpoint
):
    it, output = two
    first = output()

    def update(rank, one):
        tensors = iter(checkpoint.items())
        try:
            return one.update_weights(cancelled(tensors) if rank else tensors)
        except asyncio.CancelledError as error:
            return error

    def cancelled(tensors):
        yield next(tensors)
        raise asyncio.CancelledError

    found = on_all(it, update)
    assert type(found[1]) is asyncio.CancelledError and type(found[0]) is RankError
    assert "rank 1 failed: CancelledError" in str(found[0])
    assert on_all(it, lambda _, one: one.update_weights(checkpoint)) == [1] * 2
    assert output() == first
