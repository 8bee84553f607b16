import sys
from types import SimpleNamespace

import pytest

from gptmanager.cuda.device.device import find_cupy
from gptmanager.errors import ConfigError


class CUDARuntimeError(RuntimeError):
    pass


def fake_cupy(get_device_count):
    runtime = SimpleNamespace(getDeviceCount=get_device_count, CUDARuntimeError=CUDARuntimeError)
    return SimpleNamespace(__version__="14.2.0", cuda=SimpleNamespace(runtime=runtime))


def test_cupy_and_a_device(monkeypatch):
    cupy = fake_cupy(lambda: 1)
    monkeypatch.setitem(sys.modules, "cupy", cupy)

    assert find_cupy() is cupy


def test_no_cupy(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)

    with pytest.raises(ConfigError, match="cuda13.*CUDA 13: .*cuda12"):
        find_cupy()


def test_cupy_and_no_device(monkeypatch):
    def get_device_count():
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    monkeypatch.setitem(sys.modules, "cupy", fake_cupy(get_device_count))

    with pytest.raises(ConfigError, match="cudaErrorInsufficientDriver.*cuda12, cuda13"):
        find_cupy()
