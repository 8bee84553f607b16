"""What this machine is, and what it lacks: the first step of each phase. Prints JSON.

Exit status: 0 there is a GPU, 1 a package is missing that the library needs, 2 there is no GPU.
"""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any

NEEDED = ("torch", "numpy", "numba", "orjson", "safetensors", "tokenizers", "rich", "cupy")
TESTING = ("pytest", "pytest_timeout", "pytest_benchmark", "hypothesis")
USEFUL = ("cuda.bindings", "flashinfer", "jsonschema", "llguidance", "transformers")
TOOLS = ("nvidia-smi", "ncu", "compute-sanitizer", "nvcc")


def main() -> int:
    found: dict[str, Any] = {
        "python": platform.python_version(),
        "versions": {},
        "missing": [],
        "tools": [tool for tool in TOOLS if shutil.which(tool)],
    }
    for name in (*NEEDED, *TESTING, *USEFUL):
        _look_for(name, found)
    lacks = [name for name in NEEDED if name in found["missing"]]
    gpu = "" if lacks else _gpu(found)
    found["gpu"] = gpu
    print(json.dumps(found))
    if lacks:
        return 1
    return 0 if gpu else 2


def _look_for(name: str, found: dict[str, Any]) -> None:
    try:
        if find_spec(name) is None:
            raise ImportError(f"no module {name}")
        if name in NEEDED or name in TESTING:
            version = getattr(import_module(name), "__version__", "there")
            if name in NEEDED:
                found["versions"][name] = version
    except Exception as error:  # a package that breaks at its import is of no use either
        found["missing"].append(name)
        if find_spec(name.partition(".")[0]) is not None:
            found.setdefault("errors", {})[name] = f"{type(error).__name__}: {error}"[:200]


def _gpu(found: dict[str, Any]) -> str:
    """Its name, once one kernel of CuPy and one of torch have run on it."""
    import cupy
    import torch

    try:
        properties = torch.cuda.get_device_properties(0)
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_gib"] = round(properties.total_memory / 2**30, 1)
        found["free_gib"] = round(torch.cuda.mem_get_info()[0] / 2**30, 1)
        found["cuda"] = {
            "torch": torch.version.cuda,
            "cupy": cupy.cuda.runtime.runtimeGetVersion(),
            "driver": cupy.cuda.runtime.driverGetVersion(),
            "nvrtc": list(cupy.cuda.nvrtc.getVersion()),
        }
        assert int(torch.ones(3, device="cuda").sum()) == int(cupy.ones(3).sum()) == 3
        if "nvidia-smi" in found["tools"]:
            found["smi"] = _smi()
        return f"{properties.name} (sm_{properties.major}{properties.minor})"
    except Exception as error:
        found["no_gpu"] = f"{type(error).__name__}: {error}"[:300]
        return ""


def _smi() -> str:
    query = "--query-gpu=driver_version,clocks.max.sm,power.limit,ecc.mode.current,mig.mode.current"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    return done.stdout.strip().partition("\n")[0]


if __name__ == "__main__":
    sys.exit(main())
