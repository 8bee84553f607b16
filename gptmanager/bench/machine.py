"""Descriptions of the machine, GPU and library versions that figures were measured with."""

from __future__ import annotations

import contextlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from gptmanager.cuda.device.device import find_cupy
from gptmanager.cuda.features import Features
from gptmanager.environment.distribution import DISTRIBUTION
from gptmanager.environment.machine.cpu_features import cpu_features
from gptmanager.errors import ConfigError

REPORT_VERSION = 1
_INSTRUCTIONS = ("avx2", "avxvnni", "avx512f", "avx512vnni", "avx512bf16", "amx-bf16", "amx-int8")
_PACKAGES = (DISTRIBUTION, "torch", "numpy", "numba", "cupy-cuda13x", "cupy-cuda12x",
             "flashinfer-python", "transformers")  # fmt: skip
_SMI = {"driver_version": "driver_version", "clocks.max.sm": "clock", "power.limit": "power_limit"}


def find_gpu(hint: str) -> Any:
    """Return CuPy if it and torch find a device, else raise ConfigError that ends with `hint`."""
    if not torch.cuda.is_available():
        raise ConfigError(f"no CUDA device: torch {torch.__version__} finds none; {hint}")
    try:
        return find_cupy()
    except ConfigError as error:
        raise ConfigError(f"no CUDA device for kernels: {error}; {hint}") from error


def header(command: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Return the first fields of every report."""
    return {
        "version": REPORT_VERSION,
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": list(command),
        "machine": machine(),
        "device": card() if device.type == "cuda" else {"name": "cpu"},
        "versions": versions(),
        **_switches(),
    }


def _switches() -> dict[str, list[str]]:
    words = Features.asked().words
    return {"switches": list(words)} if words else {}


def machine() -> str:
    """Return the machine's architecture, number of logical cores and load of the last minute."""
    return f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


def processor() -> str:
    """Return the CPU's name, and the names of its instruction sets that matmuls can use."""
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    features = cpu_features()
    found = [word for word in _INSTRUCTIONS if features.get(word)]
    return ", ".join([name, *found])


def card() -> dict[str, Any]:
    """Return the properties of torch's current GPU, and the CUDA versions."""
    properties: Any = torch.cuda.get_device_properties()
    runtime = find_cupy().cuda.runtime
    return {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "multiprocessors": properties.multi_processor_count,
        "architecture": f"sm_{properties.major}{properties.minor}",
        "cache_bytes": cache_bytes(),
        "driver_cuda": _dotted(runtime.driverGetVersion()),
        "cuda_runtime": _dotted(runtime.runtimeGetVersion()),
        "torch_cuda": torch.version.cuda,
        **_smi(str(properties.uuid)),
    }


def _smi(uuid: str) -> dict[str, str]:
    """Return the fields that `nvidia-smi` has for a GPU; {} if it does not list this GPU."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return {}
    query = f"--query-gpu=uuid,{','.join(_SMI)}"
    command = [program, query, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    for line in done.stdout.splitlines():
        own, *values = line.split(", ")
        if own.removeprefix("GPU-") == uuid.removeprefix("GPU-") and len(values) == len(_SMI):
            return dict(zip(_SMI.values(), values, strict=True))
    return {}


def cache_bytes() -> int:
    """Return the size of the GPU's L2 cache in bytes, or 60 MiB if torch does not report it."""
    properties: Any = torch.cuda.get_device_properties()
    return int(getattr(properties, "L2_cache_size", 60 << 20))


def free_bytes() -> int:
    """Return how many bytes of the GPU's memory are free, after torch has released its cache."""
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info()[0])


def versions() -> Mapping[str, str]:
    """Return the versions of Python and of the installed packages that change figures."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _dotted(number: int) -> str:
    """Return a CUDA version as text: 13000 is 13.0."""
    return f"{number // 1000}.{number % 1000 // 10}"
