"""Skips tests outside of tests/cuda that run kernels on the emulator, if it cannot compile them."""

import pytest

from gptmanager.cuda import emulator
from gptmanager.errors import ConfigError


def require_cuda_headers():
    """Skip the running test without a C++ compiler, or without NVIDIA's headers."""
    try:
        emulator.Toolchain().require_headers()
    except ConfigError as error:
        pytest.skip(str(error))
