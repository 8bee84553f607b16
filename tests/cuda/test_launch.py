"""Launchers: what reaches CuPy, with CuPy faked, and what is refused before any launch."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from gptmanager.cuda import compiler, device, launch
from gptmanager.cuda.launch import DeviceLauncher, Program, architecture, check_tensors
from gptmanager.cuda.matrix import PROGRAMS
from gptmanager.errors import ConfigError

PROGRAM = Program("norms.cu", ("f<1>", "f<2>"))


class CUDADriverError(RuntimeError):
    """As CuPy's."""


@pytest.fixture
def calls(monkeypatch):
    """What a launcher asks of CuPy and of the compiler."""
    calls = []

    class Module:
        def load(self, code):
            calls.append(("load", code))

        def get_function(self, symbol):
            def function(*arguments):
                calls.append(("launch", *arguments[:-1], arguments[-1].ptr))

            function.ptr = 77
            return function

    def compile(source, arch, names, options):
        calls.append(("compile", source.name, arch, names, options))
        return compiler.Cubin(b"code", {name: f"_Z{name}" for name in names}, {}, "")

    def allow(function, attribute, size):
        if size > 227 << 10:
            raise CUDADriverError("CUDA_ERROR_INVALID_VALUE: invalid argument")
        calls.append(("allow", function, attribute, size))

    driver = SimpleNamespace(funcSetAttribute=allow, CUDADriverError=CUDADriverError)
    attributes = {(97, 0): 227 << 10}
    runtime = SimpleNamespace(deviceGetAttribute=lambda *key: attributes[key])
    cuda = SimpleNamespace(driver=driver, runtime=runtime, function=SimpleNamespace(Module=Module))
    monkeypatch.setattr(device, "find_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(compiler, "compile", compile)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    raw_stream = "_cuda_getCurrentRawStream"  # absent without CUDA
    monkeypatch.setattr(torch._C, raw_stream, lambda device: 5 + device, raising=False)
    return calls


def test_a_kernel_is_compiled_once_and_launched_on_torchs_stream(calls):
    launcher, tensor = DeviceLauncher(), torch.zeros(3)
    for _ in range(2):
        kernel = launcher.kernel(PROGRAM, "f<1>")
        kernel((2, 3), (32,), (tensor, None, np.int32(4)), 100)

    launched = ("launch", (2, 3), (32,), (tensor.data_ptr(), 0, np.int32(4)), 100, 5)
    assert (launcher.num_multiprocessors, launcher.max_shared_mem) == (132, 227 << 10)
    assert calls == [
        ("compile", "norms.cu", "sm_90a", ["f<1>"], ()),
        ("load", b"code"),
        launched,
        launched,
    ]


def test_much_shared_memory_is_asked_for_once(calls):
    launcher = DeviceLauncher()
    for size in (0, 100_000, 100_000, 90_000, 200_000):
        launcher.kernel(PROGRAM, "f<2>", size)
    asked = [call for call in calls if call[0] == "allow"]
    assert asked == [("allow", 77, 8, 100_000), ("allow", 77, 8, 200_000)]


def test_more_shared_memory_than_the_device_has(calls):
    with pytest.raises(
        ConfigError, match="f<2> needs 300000 bytes of shared memory.*INVALID_VALUE"
    ):
        DeviceLauncher().kernel(PROGRAM, "f<2>", 300_000)


def test_architectures():
    expected = {(8, 0): "sm_80", (9, 0): "sm_90a", (10, 0): "sm_100", (12, 0): "sm_120"}
    assert {it: architecture(*it) for it in expected} == expected


def test_tensors_are_checked_by_name():
    good, dtype = torch.zeros(2, 3), torch.float32
    check_tensors(a=(good, (2, None), dtype), b=(None, (7,), dtype))
    with pytest.raises(ValueError, match=r"a is torch.float32 \[2, 3\], expected .* \[3, None\]"):
        check_tensors(a=(good, (3, None), dtype))
    with pytest.raises(ValueError, match="a is torch.float32 .*expected torch.int32"):
        check_tensors(a=(good, (2, 3), torch.int32))
    with pytest.raises(ValueError, match="b is not contiguous"):
        check_tensors(a=(good, (2, 3), dtype), b=(good.T, (3, 2), dtype))
    with pytest.raises(ValueError, match=r"tensors on several devices: \['cpu', 'meta'\]"):
        check_tensors(a=(good, (2, 3), dtype), b=(good.to("meta"), (2, 3), dtype))


def test_every_program_is_a_file_and_every_file_a_program():
    files = {path.name for path in launch.FOLDER.glob("*.cu")}
    assert {program.file for program in PROGRAMS} == files
