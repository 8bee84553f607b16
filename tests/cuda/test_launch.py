"""Launchers: what reaches CuPy, with CuPy faked, and what is refused before any launch."""

from __future__ import annotations

import ctypes
import importlib
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from requirements import skip

from gptmanager.cuda.device import compiler, dependent_launch, device
from gptmanager.cuda.device.launch import DeviceLauncher, Program, architecture, check_tensors
from gptmanager.cuda.features import Features
from gptmanager.cuda.matrix import PROGRAMS
from gptmanager.errors import ConfigError

PROGRAM = Program("attention/block_copy.cu", ("f<1>", "f<2>"))
DEPENDENT = Program("norms.cu", ("f<1>", "f<2>"), dependent=True)


class CUDADriverError(RuntimeError):
    """Replaces CuPy's class of this name."""


class Calls(list):
    """`contexts`: threads in which a device was set."""


@pytest.fixture
def calls(monkeypatch):
    """What a launcher asks of CuPy and of the compiler."""
    calls, contexts = Calls(), []
    calls.contexts = contexts

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
    runtime = SimpleNamespace(
        deviceGetAttribute=lambda *key: attributes[key],
        setDevice=lambda device: contexts.append((threading.get_ident(), device)),
    )
    cuda = SimpleNamespace(driver=driver, runtime=runtime, function=SimpleNamespace(Module=Module))
    monkeypatch.setattr(device, "find_cupy", lambda: SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(compiler, "compile", compile)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    raw_stream = "_cuda_getCurrentRawStream"  # absent without CUDA
    monkeypatch.setattr(torch._C, raw_stream, lambda device: 5 + device, raising=False)
    return calls


def test_products_of_warpgroups_may_be_declined(calls):
    assert DeviceLauncher().has_warpgroups
    assert not DeviceLauncher(has_warpgroups=False).has_warpgroups


def test_a_kernel_is_compiled_once_and_launched_on_torchs_stream(calls):
    launcher, tensor = DeviceLauncher(), torch.zeros(3)
    for _ in range(2):
        kernel = launcher.kernel(PROGRAM, "f<1>")
        kernel((2, 3), (32,), (tensor, None, np.int32(4)), 100)

    launched = ("launch", (2, 3), (32,), (tensor.data_ptr(), 0, np.int32(4)), 100, 5)
    assert (launcher.num_multiprocessors, launcher.max_shared_mem) == (132, 227 << 10)
    assert calls == [
        ("compile", "block_copy.cu", "sm_90a", ["f<1>"], ()),
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


@pytest.fixture
def driver(monkeypatch):
    """cuda-bindings, with a driver that notes what it is asked for."""
    try:
        driver = importlib.import_module("cuda.bindings.driver")
    except ImportError as error:
        skip(f"launches through the driver need cuda-bindings: {error}")
    success = driver.CUresult.CUDA_SUCCESS
    driver_seen = SimpleNamespace(launches=[], version=13000, result=success, **vars(driver))

    def launch(config, function, addresses, extra):
        attributes = [(it.id.name, it.value.programmaticStreamSerializationAllowed)
                      for it in config.attrs[: config.numAttrs]]  # fmt: skip
        grid = config.gridDimX, config.gridDimY, config.gridDimZ
        block = config.blockDimX, config.blockDimY, config.blockDimZ
        places = (ctypes.c_void_p * 4).from_address(addresses)
        kinds = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int32, ctypes.c_float)
        values = [kind.from_address(at).value for kind, at in zip(kinds, places, strict=True)]
        driver_seen.launches.append(
            (int(function), grid, block, config.sharedMemBytes, int(config.hStream), attributes,
             values, extra)
        )  # fmt: skip
        return (driver_seen.result,)

    driver_seen.cuLaunchKernelEx = launch
    driver_seen.cuDriverGetVersion = lambda: (success, driver_seen.version)
    imported = lambda name: {"cuda.bindings.driver": driver_seen}[name]  # noqa: E731
    monkeypatch.setattr(dependent_launch, "import_module", imported)
    return driver_seen


def test_a_dependent_kernel_is_launched_by_the_driver(calls, driver):
    launcher, tensor = DeviceLauncher(), torch.zeros(3)
    arguments = (tensor, None, np.int32(-4), np.float32(1.5))
    for grid in ((2, 3), (7,)):
        launcher.kernel(DEPENDENT, "f<1>")(grid, (32,), arguments, 100)
    launcher.kernel(PROGRAM, "f<2>")((2,), (32,), arguments)

    attributes = [("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)]
    rest = ((32, 1, 1), 100, 5, attributes, [tensor.data_ptr(), 0, -4, 1.5], 0)
    assert driver.launches == [(77, (2, 3, 1), *rest), (77, (7, 1, 1), *rest)]
    assert [call[0] for call in calls].count("launch") == 1, "the other one by CuPy"


def test_what_is_switched_off(calls, driver, caplog):
    caplog.set_level("INFO", "gptmanager")
    features = Features.parse("no-early,no-warpgroups,no-products,no-async-copies,carveout")
    launcher = DeviceLauncher(features=features)
    assert (launcher.has_warpgroups, launcher.has_matmuls) == (False, False)
    assert not DeviceLauncher(has_warpgroups=True, features=features).has_warpgroups
    launcher.kernel(DEPENDENT, "f<1>", 100_000)((2,), (32,), (None,))
    assert not driver.launches and calls[-1][0] == "launch"
    assert calls[0] == ("compile", "norms.cu", "sm_90a", ["f<1>"], ("-DCOPIES_AT_ONCE",))
    assert calls[2:4] == [("allow", 77, 8, 100_000), ("allow", 77, 9, 100)]
    assert "GPTMANAGER_CUDA is set: no-early, no-warpgroups, no-products" in caplog.text


def test_a_thread_has_a_context_before_it_launches(calls, driver):
    kernel = DeviceLauncher().kernel(DEPENDENT, "f<1>", 100_000)
    arguments = (None, None, np.int32(1), np.float32(1))

    def work():
        for _ in range(2):
            kernel((1,), (32,), arguments)
            seen.append(len(calls.contexts))

    seen = []
    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert calls.contexts == [(threading.get_ident(), 0), (thread.ident, 0)]
    assert seen == [1, 1, 2, 2]


def test_a_launch_that_the_driver_refuses(calls, driver):
    driver.result = driver.CUresult.CUDA_ERROR_INVALID_VALUE
    kernel = DeviceLauncher().kernel(DEPENDENT, "f<1>")
    with pytest.raises(RuntimeError, match="f<1> was not launched: CUDA_ERROR_INVALID_VALUE"):
        kernel((1,), (32,), (None, None, np.int32(1), np.float32(1)))


@pytest.mark.parametrize("missing", ["bindings", "driver", "device"])
def test_where_kernels_cannot_begin_early(calls, driver, missing, monkeypatch, caplog):
    caplog.set_level("INFO", "gptmanager")
    if missing == "bindings":
        monkeypatch.setattr(dependent_launch, "import_module", importlib.import_module)
        monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    if missing == "driver":
        driver.version = 12020
    if missing == "device":
        properties = SimpleNamespace(major=8, minor=9, multi_processor_count=132)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    arguments = (None, None, np.int32(1), np.float32(1))
    DeviceLauncher().kernel(DEPENDENT, "f<1>")((2,), (32,), arguments)
    assert calls[-1] == ("launch", (2,), (32,), (0, 0, 1, 1.0), 0, 5) and not driver.launches
    words = {
        "bindings": ["cuda-bindings cannot be used"],
        "driver": ["needs a driver for CUDA 12.3 or later, got 12.2"],
    }
    assert len(caplog.messages) == len(words.get(missing, []))
    assert all(word in caplog.text for word in words.get(missing, []))


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
    with pytest.raises(ValueError, match="b must be contiguous"):
        check_tensors(a=(good, (2, 3), dtype), b=(good.T, (3, 2), dtype))
    with pytest.raises(
        ValueError, match=r"all tensors must be on one device, got \['cpu', 'meta'\]"
    ):
        check_tensors(a=(good, (2, 3), dtype), b=(good.to("meta"), (2, 3), dtype))


def test_every_program_is_a_file_and_every_file_a_program():
    folder = compiler.FOLDER
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*.cu")}
    assert {program.file for program in PROGRAMS} == files
