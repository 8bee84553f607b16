"""Memory of the host that CUDA is told of: exact, and given back, with a CUDA that notes it."""

from __future__ import annotations

import gc
import io
import logging
import tempfile
from math import prod

import pytest
import torch

from gptmanager.memory.host_memory import HostMemory
from gptmanager.memory.released_memory import ReleasedMemory

CUDA = torch.device("cuda")


class Cuda:
    """`registered`: bytes by address."""

    def __init__(self, refuses=False):
        self.registered = {}
        self.refuses = refuses

    def register(self, address, num_bytes):
        if self.refuses:
            raise RuntimeError("CUDA error: operation not supported")
        assert address % 4096 == 0, "CUDA registers whole pages"
        self.registered[address] = num_bytes

    def unregister(self, address):
        del self.registered[address]


def memory_of(cuda):
    return HostMemory(CUDA, cuda.register, cuda.unregister)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32])
def test_exactly_the_bytes_that_are_needed(dtype):
    cuda, shape = Cuda(), (3, 5, 2, 1001)
    memory = memory_of(cuda)
    tensor = memory.empty(shape, dtype)
    assert cuda.registered == {tensor.data_ptr(): prod(shape) * dtype.itemsize}
    assert tensor.shape == shape and tensor.dtype == dtype
    tensor.view(torch.uint8).fill_(1)  # all of it can be written to
    other = memory.empty((7,), dtype)
    assert len(cuda.registered) == 2
    del memory
    gc.collect()
    assert not cuda.registered, "no longer than its owner"
    assert int(tensor.view(torch.uint8).sum()) == tensor.nbytes, "a view of it is still good"
    assert other.nbytes == 7 * dtype.itemsize


def test_what_cuda_refuses_is_pinned_by_torch(caplog, monkeypatch):
    caplog.set_level(logging.WARNING, "gptmanager")
    empty, pinned = torch.empty, []

    def fake(*given, pin_memory=False, **options):
        pinned.append(pin_memory)
        return empty(*given, **options)

    monkeypatch.setattr(torch, "empty", fake)
    assert memory_of(Cuda(refuses=True)).empty((2, 3), torch.float32).shape == (2, 3)
    assert pinned == [True] and "cannot register 24 bytes of host memory" in caplog.text


def test_the_plain_way():
    cuda = Cuda()
    on_cpu = HostMemory(torch.device("cpu"), cuda.register, cuda.unregister)
    assert on_cpu.empty((2, 3), torch.float32).shape == (2, 3)
    assert HostMemory(torch.device("cpu")).empty((0, 3), torch.float32).shape == (0, 3)
    assert not cuda.registered


def test_what_the_end_of_the_registration_says(caplog):
    caplog.set_level(logging.WARNING, "gptmanager")

    def refuse(address):
        raise RuntimeError("CUDA error: context is destroyed")

    memory = HostMemory(CUDA, lambda address, num_bytes: None, refuse)
    memory.empty((4,), torch.float32)
    del memory
    gc.collect()
    assert "stays registered with CUDA: CUDA error: context is destroyed" in caplog.text


def test_released_tensors_come_back_from_a_file_that_is_read_in_parts(tmp_path, monkeypatch):
    """The system reads and writes at most 2 GiB at a time."""

    class InParts(io.FileIO):
        def write(self, data):
            return super().write(memoryview(data)[:1000])

        def readinto(self, buffer):
            return super().readinto(memoryview(buffer)[:1000])

    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: InParts(tmp_path / "file", "w+"))
    tensors = torch.arange(20_000.0).split(5000)
    memory = ReleasedMemory(tensors, tensors[1:3])
    memory.release()
    for tensor in tensors:
        tensor.zero_()
    memory.restore()
    assert torch.equal(torch.cat(tensors[1:3]), torch.arange(5000.0, 15_000.0))
