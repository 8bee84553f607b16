"""`gptmanager env`: prints what a bug report needs."""

from __future__ import annotations

import argparse
import math
import os
import platform
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from gptmanager.bench.machine import card, find_gpu, processor, versions
from gptmanager.cuda.cache_folder import cache_folder
from gptmanager.cuda.features import Features
from gptmanager.environment.distribution import unmet_requirements
from gptmanager.environment.machine.control_groups import cpu_quota
from gptmanager.environment.machine.cores import num_cores, num_schedulable
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.errors import ConfigError, error_summary
from gptmanager.kernels.gemm import matmul
from gptmanager.kernels.gemm.int4_tiles import has_byte_dots
from gptmanager.kernels.gemm.int8_tiles import has_int8_dots
from gptmanager.kernels.gemm.int16_tiles import has_int16_dots
from gptmanager.kernels.gemm.matrix_tiles import has_matrix_unit
from gptmanager.kernels.simd.dtypes import HAS_FLOAT16
from gptmanager.kernels.simd.machine_code import folder_of
from gptmanager.kernels.simd.pairs import has_fast_pairs
from gptmanager.terminal.tables import print_report, table

# Variables that are printed with their values. `serve`'s variables are not: they may hold keys.
_VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "NUMBA_CACHE_DIR", "XDG_CACHE_HOME", "HF_HOME")
_SWITCHES = ("GPTMANAGER_CUDA", "NUMBA_CPU_NAME", "NUMBA_CPU_FEATURES", "CUDA_VISIBLE_DEVICES")
_KERNELS: dict[str, Callable[[], bool]] = {
    "bfloat16 in a matrix unit": has_matrix_unit,
    "bfloat16 in pairs": has_fast_pairs,
    "float16 conversions": lambda: HAS_FLOAT16,
    "int8 times int16": has_int16_dots,
    "int8 times int8": has_int8_dots,
    "int4 times int8": has_byte_dots,
}


def main(options: argparse.Namespace) -> int:
    """Print the report and return the exit status."""
    found = report()
    print_report(found, [table(("", ""), _rows(found))], as_json=options.json)
    return 0


def _rows(found: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each line of the table. A mapping has one line per key."""
    for name, value in found.items():
        if not isinstance(value, Mapping):
            yield name, str(value)
            continue
        for index, (key, inner) in enumerate(value.items()):
            yield name if index == 0 else "", f"{key}: {inner}"


def report() -> dict[str, Any]:
    """Return the facts about this machine and installation, without keys and host names."""
    used = [name for name, has in _KERNELS.items() if has()]
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "versions": versions(),
        "cpu": processor(),
        "kernels": ", ".join(used) or "none of the special ones",
        "cores": _cores(),
        "memory": f"{free_memory_bytes() / 2**30:.1f} GiB free",
        "caches": {
            "kernels of the CPU": folder_of(matmul.multiply_float32) or "none can be written",
            "kernels of the GPU": _gpu_cache(),
        },
        "gpu": _gpu(),
        "switches": ", ".join(Features.asked().words) or "none",
        "environment": _environment(),
        **_requirements(),
    }


def _cores() -> str:
    quota = cpu_quota()
    limit = "no quota" if math.isinf(quota) else f"a quota of {quota:.1f}"
    return (
        f"{os.cpu_count()} in the machine, {num_schedulable()} for this process, {limit}: "
        f"{num_cores()} used, {torch.get_num_threads()} threads of torch"
    )


def _gpu_cache() -> str:
    try:
        return str(cache_folder("cuda"))
    except ConfigError:
        return "none can be written"


def _gpu() -> Any:
    try:
        find_gpu("the CPU is used")
        return {name: str(value) for name, value in card().items()}
    except ConfigError as error:
        return error_summary(error)


def _environment() -> dict[str, str]:
    """Return name -> value for the variables in `_VARIABLES` and `_SWITCHES` that are set.

    The result also has each variable of `serve` that is set, but with "set" in place of its value.
    """
    found = {name: os.environ[name] for name in (*_VARIABLES, *_SWITCHES) if name in os.environ}
    found |= {name: "set" for name in sorted(os.environ) if name.startswith("GPTMANAGER_SERVE_")}
    return found


def _requirements() -> dict[str, Any]:
    """Return whether the requirements of the library and of each extra are met, or what is missing.

    A package that is too old counts as missing.
    """
    unmet = unmet_requirements()
    lacking = {extra: ", ".join(map(str, unmet[extra])) for extra in sorted(unmet)}
    own = lacking.pop("", "")
    return {
        "requirements": f"lacks {own}" if own else "met",
        "extras": {extra: f"lacks {it}" if it else "installed" for extra, it in lacking.items()},
    }
