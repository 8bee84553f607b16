"""The machine instructions of kernels, by NVIDIA's disassembler."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
from pathlib import Path

from requirements import skip

from gptmanager.cuda.device import compiler
from gptmanager.errors import ConfigError

# kernels that load numbers before they wait, with `ptx::load_early`
LOADS_EARLY = {"rope_and_write", "generation_attention", "context_attention", "warpgroup_attention"}


@functools.cache
def disassembler() -> str:
    """Return the path of nvdisasm, from NVIDIA's wheel or from a toolkit."""
    try:
        compiler.find_nvrtc()
    except ConfigError as error:
        skip(str(error))
    places = (Path(folder, "nvidia/cu13/bin/nvdisasm") for folder in sys.path)
    found = next((str(it) for it in places if it.exists()), shutil.which("nvdisasm"))
    if found is None:
        skip("needs nvdisasm: pip install nvidia-cuda-nvdisasm")
    return found


def instructions(code: bytes, folder: Path) -> dict[str, list[str]]:
    """Kernel -> its instructions, without predicates."""
    cubin = folder / "kernels.cubin"
    cubin.write_bytes(code)
    done = subprocess.run([disassembler(), "-c", cubin], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = {}
    for section in done.stdout.split("\t.section\t.text._Z")[1:]:
        length, rest = re.match(r"(\d+)(.*)", section).groups()
        line = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][^;]*?) *;"
        found[rest[: int(length)]] = re.findall(line, section)
    return found
