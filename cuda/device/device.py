"""Import CuPy, but not before a CUDA device is needed, and report what is missing."""

from __future__ import annotations

from typing import Any

from gptmanager.environment.distribution import install_command
from gptmanager.errors import ConfigError


def find_cupy() -> Any:
    """Return CuPy. If CuPy can use no CUDA device, raise a ConfigError that says why."""
    try:
        import cupy
    except ImportError as error:
        raise ConfigError(
            f"device='cuda' needs CuPy: {install_command('cuda13')}; if the driver is older than "
            f"CUDA 13: {install_command('cuda12')} ({error})"
        ) from error
    try:
        cupy.cuda.runtime.getDeviceCount()  # also raises without a device
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(
            f"device='cuda' needs a CUDA device, and CuPy {cupy.__version__} finds none: {error}. "
            "The driver must be as new as CuPy's CUDA (extras cuda12, cuda13)"
        ) from error
    return cupy
