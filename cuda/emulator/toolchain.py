"""Find g++ and NVIDIA's headers, and build libraries with them.

Built libraries are kept in the cache folder, under a hash of the compiler's path, the flags and all
source text. Two processes may build the same library at the same time: each writes a temporary file
and renames it.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from gptmanager.cuda.cache_folder import cache_folder, seal, unseal
from gptmanager.cuda.emulator.reports import EmulatorError
from gptmanager.cuda.emulator.source import separate_headers
from gptmanager.errors import ConfigError

FOLDER = Path(__file__).resolve().parent
_RUNTIME = ("machine.cpp", "memory.cpp", "check.cpp", "warpgroup.cpp")
# Reasons for these flags: kernels reinterpret memory; longjmp abandons stacks; a template's shared
# variables must not be the same object in all loaded libraries (as GNU unique symbols would be);
# and g++ must not fuse __fmul_rn with an addition.
_FLAGS = (
    "-std=c++17 -g1 -fPIC -fvisibility=hidden -fno-strict-aliasing -fno-gnu-unique "
    "-fno-threadsafe-statics -fwrapv -ffp-contract=off -U_FORTIFY_SOURCE -w"
).split()
# Operations that fail on a GPU, or have another result than on a CPU, are always checked, which
# costs little. Jump threading would duplicate a warp operation, one copy for each path to it.
FAST = (
    *("-O1", "-fsanitize=alignment,shift-exponent,float-cast-overflow"),
    *("-fno-sanitize-recover=all", "-fno-thread-jumps"),
)
CHECKED = (*FAST, "-fsanitize=thread,bounds-strict", "-fno-omit-frame-pointer")

_INSTALL_HEADERS = (
    "NVIDIA's headers are not installed: pip install 'nvidia-cuda-runtime==13.0.*' "
    "'nvidia-cuda-crt==13.0.*' 'nvidia-cuda-cccl==13.0.*'"
)
_SEALED = "1"  # version of the cached files' format; earlier formats had no digests
_STDIN = re.compile(r'^(# \d+ )"<stdin>"', re.MULTILINE)


class Toolchain:
    """A g++, NVIDIA's headers if installed, and a cache folder.

    Raises `ConfigError` without g++.
    """

    def __init__(self, cache: Path | None = None) -> None:
        named = os.environ.get("CXX")
        found = shutil.which(named or "g++")
        if found is None:
            raise ConfigError(
                f"the CUDA emulator needs the C++ compiler g++, but CXX={named!r} was not found"
                if named
                else "the CUDA emulator needs the C++ compiler g++, which is not on PATH: install "
                "it (Debian and Ubuntu: apt-get install g++; Fedora: dnf install gcc-c++), or set "
                "the environment variable CXX to another one"
            )
        self.compiler = found
        self.headers = cuda_headers()
        self.cache = cache or cache_folder("emulator")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Toolchain) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((self.compiler, self.headers, self.cache))

    def require_headers(self) -> None:
        """Raise `ConfigError` if NVIDIA's headers (cuda_fp16.h and others) are not installed."""
        if self.headers is None:
            raise ConfigError(f"the CUDA emulator cannot run these kernels: {_INSTALL_HEADERS}")

    def preprocess(self, text: str, name: str, options: Sequence[str]) -> str:
        """Return preprocessed C++. Raises `EmulatorError` with g++'s messages if it fails."""
        flags = [*_FLAGS, *options, *self._includes()]
        made = self._run(["-E", *flags, "-x", "c++", "-"], text, name)
        # The source is named <stdin> in g++'s line markers. Without the replacement, addr2line may
        # print <stdin> as the file of a line.
        return _STDIN.sub(lambda found: f'{found[1]}"{name}"', made)

    def build(self, text: str, name: str, checked: bool) -> Path:
        """Return the path of a shared library: the preprocessed `text`, linked with the emulator.

        The library is built unless it is in the cache. `name` is for error messages.
        """
        flags = [*_FLAGS, *(CHECKED if checked else FAST)]
        runtime = self._runtime()
        key = self._key([_SEALED, text, runtime.name, *flags])
        return self._kept(f"{key}.so", lambda target: self._compile(text, name, flags, target))

    def _compile(self, text: str, name: str, flags: list[str], target: Path) -> None:
        compiled = target.with_suffix(".o")
        arguments = [*flags, "-x", "c++-cpp-output", "-c", "-", "-o", str(compiled)]
        headers, own = separate_headers(text, self.headers)
        try:
            used = f'#pragma GCC pch_preprocess "{self._precompiled(headers, flags)}"\n'
            self._run(arguments, f'# 0 "{name}"\n{used}{own}', name)
        except EmulatorError:  # an error in `text`, or g++ cannot use the precompiled headers
            self._run(arguments, text, name)
        # Linked without sanitizers: the machine defines the functions that instrumented code calls.
        files = [str(compiled), str(self._runtime()), "-lrt"]  # timers, before glibc 2.34
        self._run(["-shared", *_linker(), "-Wl,-Bsymbolic", *files, "-o", str(target)], "", name)
        compiled.unlink()

    def _precompiled(self, headers: str, flags: list[str]) -> Path:
        """Return the path of the precompiled `headers`.

        For a small kernel, parsing the headers takes most of the compile time.
        """

        def make(target: Path) -> None:
            text = target.with_suffix(".ii")
            text.write_text(headers, "utf-8")
            arguments = ["-x", "c++-header", "-fpreprocessed", str(text), "-o", str(target)]
            self._run([*flags, *arguments], "", "CUDA's headers")

        return self._kept(f"{self._key([_SEALED, headers, *flags])}.gch", make)

    def _runtime(self) -> Path:
        sources = [*_RUNTIME, "machine.h", "state.h"]
        texts = [(FOLDER / source).read_text("utf-8") for source in sources]
        text = "".join(f'#include "{FOLDER / source}"\n' for source in _RUNTIME)
        flags = [*_FLAGS, "-O2", "-c", "-x", "c++", "-"]
        return self._kept(
            f"{self._key([_SEALED, *texts, *flags])}.machine",
            lambda target: self._run([*flags, "-o", str(target)], text, "the emulator"),
        )

    def _key(self, parts: Sequence[str]) -> str:
        return hashlib.sha256("\0".join([self.compiler, *parts]).encode()).hexdigest()[:32]

    def _kept(self, name: str, make: Callable[[Path], object]) -> Path:
        path = self.cache / name
        if not _is_whole(path, *_stamp(path)):
            self.cache.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.cache) as folder:
                made = Path(folder) / name
                make(made)
                made.write_bytes(seal(made.read_bytes()))
                made.rename(path)
        return path

    def _includes(self) -> list[str]:
        if self.headers is None:
            return [f"-I{FOLDER}"]
        folders = (f"-I{it}" for it in (FOLDER, self.headers, self.headers / "cccl"))
        return [*folders, "-DEMULATOR_CUDA_HEADERS"]

    def _run(self, arguments: Sequence[str], text: str, name: str) -> str:
        command = [self.compiler, *arguments]
        done = subprocess.run(
            command,
            input=text,
            capture_output=True,
            encoding="utf-8",
            env={**os.environ, "LC_ALL": "C"},  # messages in English, with ASCII quotes
            check=False,
            start_new_session=True,  # Python handles a Ctrl-C, not the compiler
        )
        if done.returncode:
            hint = self._hint(done.stderr)
            raise EmulatorError(f"{name} does not compile:\n{done.stderr.strip()}{hint}")
        return done.stdout

    def _hint(self, complaint: str) -> str:
        if self.headers is None and "No such file" in complaint and "cuda" in complaint:
            return f"\n{_INSTALL_HEADERS}"
        if "\nname_expressions:" in complaint:
            return "\nEach of `name_expressions` must name a kernel, with all template arguments"
        if "Assembler messages" in complaint or "'asm'" in complaint:
            return (
                "\nInline PTX does not run on a CPU: call the functions of intrinsics.cuh, or put "
                "it between #ifdef __CUDA_ARCH__ and a C++ version"
            )
        return ""


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes with the file's content; () without a file."""
    try:
        found = path.stat()
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


@functools.cache  # precompiled headers have 20 MB, and each library of a program needs them
def _is_whole(path: Path, *stamp: int) -> bool:
    return unseal(path) is not None


@functools.cache
def _linker() -> tuple[str, ...]:
    """Return the option for gold, if it is installed: it needs a third of the default's time."""
    return () if shutil.which("ld.gold") is None else ("-fuse-ld=gold",)


def cuda_headers() -> Path | None:
    """Return the folder of cuda_fp16.h, from NVIDIA's wheels or a toolkit; None if not found."""
    folders = [Path(os.environ.get("CUDA_PATH", "/usr/local/cuda")) / "include"]
    try:
        runtime = importlib.metadata.distribution("nvidia-cuda-runtime")
        folders.insert(0, Path(str(runtime.locate_file("nvidia/cu13/include"))))
    except importlib.metadata.PackageNotFoundError:
        pass
    needed = (
        *("cuda_fp16.h", "cuda_bf16.h", "cuda_fp8.h", "vector_types.h"),
        *("nv/target", "crt/host_defines.h"),
    )
    for folder in folders:
        if all((folder / name).exists() for name in needed):
            return folder
    return None
