"""Where kernels run in tests: always on the emulator, and on the GPU where there is one."""

from __future__ import annotations

import contextlib
import functools
from types import SimpleNamespace

import pytest
import torch
from devices import there_is
from requirements import skip
from separate_device import DeviceTensor, SeparateDevice, SeparateStream, move_modules, pin_in, real
from sticky_errors import StickyErrors

from gptmanager.assembly import assemble as assembly
from gptmanager.assembly.device_backend import DeviceBackend
from gptmanager.cuda import emulator
from gptmanager.cuda.device.launch import DeviceLauncher
from gptmanager.decoding.processors import raw_kernel
from gptmanager.environment.distribution import install_command
from gptmanager.errors import ConfigError

BITS = {torch.bfloat16: torch.uint16, torch.float8_e4m3fn: torch.uint8}


def pytest_configure(config):
    config.pluginmanager.register(StickyErrors(), "sticky errors")


class EmulatedMachine:
    """A device of which the host shares nothing."""

    def __init__(self, **options):
        self.stream = SeparateStream(**options)
        self.launcher = self.stream.launcher

    def tensor(self, values):
        """A copy that ends where nothing can be read."""
        bits = BITS.get(values.dtype)
        array = values.view(bits).numpy() if bits else values.numpy()
        copy = torch.from_numpy(emulator.asarray(array))
        return DeviceTensor(copy.view(values.dtype) if bits else copy)

    def empty(self, shape, dtype):
        return self.tensor(
            torch.full(shape, torch.nan if dtype.is_floating_point else 1, dtype=dtype)
        )


class DeviceMachine:
    def __init__(self):
        self.stream = contextlib.nullcontext()
        self.launcher = DeviceLauncher()

    def tensor(self, values):
        return values.cuda()

    def empty(self, shape, dtype):
        return torch.full(
            shape, -1 if not dtype.is_floating_point else torch.nan, dtype=dtype
        ).cuda()


@functools.cache
def new_machine(kind):
    if kind == "gpu":
        return DeviceMachine()
    return EmulatedMachine(
        check=kind != "emulator", order="reverse" if kind == "reversed check" else "forward"
    )


@pytest.fixture(scope="session")
def toolchain():
    """g++, and NVIDIA's headers, which kernels of this project need."""
    try:
        found = emulator.Toolchain()
    except ConfigError as error:
        skip(str(error))
    if found.headers is None:
        skip(f"the emulator needs NVIDIA's headers here: {install_command('test-cuda')}")
    return found


def find(kind, request):
    if kind != "gpu":
        request.getfixturevalue("toolchain")
    try:
        return new_machine(kind)
    except ConfigError as error:
        skip(str(error))


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def machine(request, monkeypatch):
    """Runs kernels; `tensor` and `empty` make what they work on."""
    machine = find(request.param, request)
    if request.param == "emulator":
        pin_in([machine.stream], monkeypatch)
    with machine.stream:
        yield machine


@pytest.fixture(params=["check", "reversed check"])
def checked_machine(request):
    """Runs kernels and reports races, and reads of what nothing was written to."""
    machine = find(request.param, request)
    with machine.stream:
        yield machine


@functools.cache
def machine_in_order(order):
    return EmulatedMachine(order=order)


@pytest.fixture
def ordered_machines(toolchain):
    """Emulators that run blocks from the first, from the last, and in some other order."""
    with contextlib.ExitStack() as streams:
        machines = [machine_in_order(order) for order in ("forward", "reverse", 7)]
        for machine in machines:
            streams.enter_context(machine.stream)
        yield machines


@pytest.fixture
def device_machine(request):
    """The GPU, for tests that are marked `gpu`."""
    return find("gpu", request)


@pytest.fixture
def separate(monkeypatch):
    """Managers on the emulator get a device of which the host shares nothing; their streams.

    Nothing may wait for it in a step.
    """
    there_is("emulator")
    place, streams = assembly.place, []

    def place_apart(params, local_rank=None):
        if params.device != "emulator":
            return place(params)
        SeparateDevice().__enter__()  # until the manager's thread ends
        streams.append(SeparateStream())
        return DeviceBackend(streams[-1], params)

    class Module(emulator.Module):
        def get_function(self, name):
            kernel = super().get_function(name)
            return lambda *arguments: streams[-1].launch(kernel, *real(arguments))

    monkeypatch.setattr(assembly, "place", place_apart)
    monkeypatch.setattr(raw_kernel, "emulator", SimpleNamespace(Module=Module))
    pin_in(streams, monkeypatch)
    move_modules(monkeypatch)
    yield streams
    waits = [wait for stream in streams for wait in stream.waits if "reference.py" not in wait]
    assert not waits  # but for what no kernel covers, which the reference computes


@pytest.fixture(params=["separate", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    """Where managers run, as `OptionalParams.device`."""
    if request.param == "separate":
        request.getfixturevalue("separate")
        return "emulator"
    return there_is(request.param)
