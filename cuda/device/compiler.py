"""Compile CUDA C++ with NVRTC (through CuPy) to a cubin, and find the resources of its kernels.

No CUDA device is needed. Cubins are kept in the user's cache folder, under a hash of their inputs:
the file's name and text, the headers that it includes from its folder or this package, the
architecture, the options, the kernels' names, and the compiler's version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from gptmanager.cuda.cache_folder import cache_folder, seal, unseal
from gptmanager.errors import ConfigError, GptManagerError

FOLDER = Path(__file__).resolve().parents[1]  # the root of include paths
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100", "sm_120")
_WHEELS = {  # wheels with CUDA's headers -> the folder in the wheel
    "nvidia-cuda-runtime": "nvidia/cu13/include",
    "nvidia-cuda-runtime-cu12": "nvidia/cuda_runtime/include",
}
_INCLUDE = re.compile(r'^\s*#include "([^"]+)"', re.MULTILINE)
_FUNCTION = re.compile(r"(?:Compiling entry function|Function properties for) '?(\w+)'?")
_KEPT = "3"  # version of the cached files' format; version 2 had no digests
_FIGURES = {
    "registers": re.compile(r"Used (\d+) registers"),
    "shared_memory": re.compile(r"(\d+) bytes smem"),
    "spill_stores": re.compile(r"(\d+) bytes spill stores"),
    "spill_loads": re.compile(r"(\d+) bytes spill loads"),
    "stack": re.compile(r"(\d+) bytes stack frame"),
}


class CompilationError(GptManagerError):
    """NVRTC could not compile the code; the message contains its log."""


@dataclass(frozen=True)
class Figures:
    """The resources of one kernel: registers per thread, and sizes in bytes.

    `shared_memory` is the static shared memory of a block; spills and the stack are per thread.
    """

    registers: int = 0
    shared_memory: int = 0
    spill_stores: int = 0
    spill_loads: int = 0
    stack: int = 0


@dataclass(frozen=True)
class Cubin:
    """Machine code for one architecture. `lowered` maps name expressions to symbols in `code`."""

    code: bytes
    lowered: Mapping[str, str]
    figures: Mapping[str, Figures]  # by name expression
    log: str


def find_nvrtc() -> Any:
    """Return CuPy's binding of NVRTC. Raises `ConfigError` if CuPy or NVRTC is not installed."""
    try:
        from cupy_backends.cuda.libs import nvrtc
    except ImportError as error:
        raise ConfigError(
            f"compiling kernels needs CuPy, which cannot be imported: {error}"
        ) from error
    try:
        nvrtc.getVersion()
    except Exception as error:  # CuPy's error class for this is private
        raise ConfigError(
            f"compiling kernels needs NVRTC: pip install nvidia-cuda-nvrtc ({error})"
        ) from error
    return nvrtc


def compile(
    source: str | Path,
    arch: str,
    names: Sequence[str],
    options: Sequence[str] = (),
    *,
    cache: Path | None = None,
) -> Cubin:
    """Compile the kernels `names` (such as `shrink<float>`) for `arch` (such as `sm_90a`).

    `source` is a file, or CUDA C++ in a string that may include the headers of this package.
    `options` are NVRTC's. `cache` is the folder for cubins, by default one in the user's cache.
    Raises `CompilationError` with the log if NVRTC fails, and `ConfigError` if CuPy, NVRTC or
    CUDA's headers are missing.
    """
    nvrtc = find_nvrtc()
    file = source.name if isinstance(source, Path) else "kernel.cu"
    text = source.read_text("utf-8") if isinstance(source, Path) else source
    folder = source.parent if isinstance(source, Path) else FOLDER
    flags = ("-std=c++17", f"-arch={arch}", "-lineinfo", "--ptxas-options=-v", *options)
    keyed = [_KEPT, str(nvrtc.getVersion()), file, *_texts(text, folder), *flags, *names]
    key = hashlib.sha256("\0".join(keyed).encode()).hexdigest()[:32]
    kept = (cache or cache_folder("cubins")) / key
    described, code = unseal(kept / "kernels.json"), unseal(kept / "cubin")
    if described is None or code is None:
        includes = (f"-I{folder}", f"-I{FOLDER}", *_cuda_includes())
        made = _compile(nvrtc, text, file, names, (*flags, *includes))
        with contextlib.suppress(OSError):  # without a writable cache, each call compiles
            _keep(kept, made)
        return made
    found = json.loads(described)
    figures = {name: Figures(**values) for name, values in found["figures"].items()}
    return Cubin(code, found["lowered"], figures, found["log"])


def _compile(
    nvrtc: Any, text: str, file: str, names: Sequence[str], flags: tuple[str, ...]
) -> Cubin:
    program = nvrtc.createProgram(text, file, (), ())
    try:
        for name in names:
            nvrtc.addNameExpression(program, name)
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError:
            log = nvrtc.getProgramLog(program).strip()
            raise CompilationError(f"{file} does not compile:\n{log}") from None
        log = nvrtc.getProgramLog(program)
        lowered = {name: nvrtc.getLoweredName(program, name) for name in names}
        return Cubin(_whole(nvrtc.getCUBIN(program)), lowered, _figures(log, lowered), log)
    finally:
        nvrtc.destroyProgram(program)


def _whole(code: bytes) -> bytes:
    """Restore the last byte of a cubin, which CuPy cuts off as the terminator of a string.

    This is the highest byte of the alignment in the last program header, and therefore 0. The ELF
    header says where its tables end. Raises `CompilationError` if more bytes are missing.
    """
    tables = struct.unpack_from("<2Q", code, 32)
    sizes = struct.unpack_from("<4H", code, 54)
    size = max(at + sizes[i] * sizes[i + 1] for at, i in zip(tables, (0, 2), strict=True))
    if size > len(code) + 1:
        raise CompilationError(f"NVRTC's cubin has {len(code)} bytes, its header says {size}")
    return code.ljust(size, b"\0")


def _figures(log: str, lowered: Mapping[str, str]) -> dict[str, Figures]:
    """Return the figures of the kernels in the log of ptxas. `lowered`: name -> symbol."""
    sections: dict[str, str] = {}
    symbol = ""
    for line in log.splitlines():
        found = _FUNCTION.search(line)
        symbol = found[1] if found else symbol
        sections[symbol] = sections.get(symbol, "") + line + "\n"
    return {name: _figures_of(sections.get(symbol, "")) for name, symbol in lowered.items()}


def _figures_of(section: str) -> Figures:
    found = {name: pattern.search(section) for name, pattern in _FIGURES.items()}
    return Figures(**{name: int(match[1]) for name, match in found.items() if match})


def _texts(text: str, folder: Path) -> list[str]:
    """Return `text` and the headers it includes from `folder` or this package, at any depth."""
    texts, pending, seen = [text], _INCLUDE.findall(text), set()
    while pending:
        name = pending.pop()
        paths = [path / name for path in (folder, FOLDER) if (path / name).exists()]
        if name not in seen and paths:
            texts.append(paths[0].read_text("utf-8"))
            pending += _INCLUDE.findall(texts[-1])
        seen.add(name)
    return texts


def _cuda_includes() -> tuple[str, ...]:
    """Return options for the folder of CUDA's headers: CuPy's, a wheel's, or a toolkit's."""
    for folder in _header_folders():
        if (folder / "cuda_fp16.h").exists():
            return f"-I{folder}", f"-I{folder / 'cccl'}"
    raise ConfigError("compiling kernels needs CUDA's headers: pip install nvidia-cuda-runtime")


def _header_folders() -> Iterator[Path]:
    import cupy

    root = cupy.cuda.get_cuda_path()
    if root is not None:
        yield Path(root, "include")
    for wheel, folder in _WHEELS.items():
        try:
            yield Path(str(metadata.distribution(wheel).locate_file(folder)))
        except metadata.PackageNotFoundError:
            pass
    toolkits = (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    yield from (Path(toolkit, "include") for toolkit in toolkits if toolkit)


def _keep(folder: Path, cubin: Cubin) -> None:
    """Store `cubin` in `folder`: write a temporary folder, then rename it.

    Other processes may store the same cubin at the same time.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    figures = {name: asdict(values) for name, values in cubin.figures.items()}
    described = {"lowered": dict(cubin.lowered), "figures": figures, "log": cubin.log}
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        made = Path(temporary) / "made"
        made.mkdir()
        (made / "kernels.json").write_bytes(seal(json.dumps(described).encode()))
        (made / "cubin").write_bytes(seal(cubin.code))
        shutil.rmtree(folder, ignore_errors=True)  # a damaged entry
        with contextlib.suppress(OSError):  # another process has just stored it
            made.rename(folder)
