"""Convert a kernel from CUDA C++ to C++ that g++ compiles.

Two things in the kernel are replaced: arrays of dynamic shared memory, which have no definition on
a CPU, and `__noinline__`, which cannot be a macro, because system headers use this word inside
`__attribute__`. Line numbers do not change.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from gptmanager.cuda.emulator.reports import EmulatorError

# `extern __shared__ __align__(16) float x[];` after the preprocessor. Both patterns begin with a
# word instead of `\b`: the search in megabytes of headers is then several times as fast.
_DYNAMIC = re.compile(
    r"extern(?<!\wextern)\s+__constinit\s+thread_local\s+"
    r"(?:__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*)*"
    r"([^;{}()\[\]]+?)\b(\w+)\s*\[\s*\]\s*;"
)
_NOINLINE = re.compile(r"__noinline__(?<!\w__noinline__)\b(?!\s*[,)])")
_MEANINGFUL = ("-D", "-U", "-I", "-include", "-std=", "--std=")
_EXPORTS = '"name_expressions"'  # the file name of the descriptors, one line per kernel
_PRELUDE = str(Path(__file__).resolve().parent / "cuda_cpu.h")
_MARK = re.compile(r'^# \d+ "([^"]*)"([ \d]*)$', re.MULTILINE)  # flags: 1 enters a file, 2 returns
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'')


def translation_unit(source: str, name: str, kernels: Sequence[str]) -> str:
    """Return C++ with the emulator, `source` as file `name`, and a descriptor for each kernel."""
    exports = (f"EMULATOR_EXPORT({i}, {kernel})\n" for i, kernel in enumerate(kernels))
    return (
        '#include "cuda_cpu.h"\n'
        f'#line 1 "{name}"\n{source}\n'
        "#ifdef GPTMANAGER_INTRINSICS\n"
        '#include "intrinsics_cpu.h"\n'
        "#endif\n"
        '#include "export.h"\n'
        f"#line 1 {_EXPORTS}\n{''.join(exports)}"
    )


def only_kernels(unit: str, numbers: Iterable[int]) -> str:
    """Return preprocessed `unit` with only the descriptors of the kernels with these numbers."""
    source, mark, exports = unit.partition(f"# 1 {_EXPORTS}\n")
    lines = exports.splitlines()
    return source + mark + "\n".join(lines[number] for number in numbers)


def separate_headers(unit: str, cuda_headers: Path | None) -> tuple[str, str]:
    """Return the text of system and CUDA headers, and the rest of preprocessed `unit`.

    The rest keeps its line numbers. `cuda_headers` is the folder of NVIDIA's headers, None if they
    are not installed. `cuda_cpu.h` counts as a CUDA header.
    """
    folder = f"{cuda_headers}/"
    headers: list[str] = []
    rest: list[str] = []
    depth = 0  # number of nested headers around the current text
    begin = 0  # start of the text that is in neither list yet
    for mark in _MARK.finditer(unit):
        name, flags = mark[1], mark[2].split()
        if "1" in flags:
            if not depth and not ("3" in flags or name.startswith(folder) or name == _PRELUDE):
                continue
            if not depth:
                rest.append(unit[begin : mark.start()])
                begin = mark.start()
            depth += 1
        elif "2" in flags and depth:
            depth -= 1
            if not depth:
                headers.append(unit[begin : mark.start()])
                begin = mark.start()
    rest.append(unit[begin:])
    return "".join(headers), "".join(rest)


def compiler_options(options: Sequence[str], folder: Path) -> list[str]:
    """Return options for g++: our own, and the NVRTC `options` that g++ understands.

    The `options` that g++ understands are those for macros, headers and the C++ standard. `folder`
    is also searched for headers.
    """
    kept = [
        option.removeprefix("-") if option.startswith("--std") else option for option in options
    ]
    meaningful = (option for option in kept if option.startswith(_MEANINGFUL))
    return ["-DGPTMANAGER_EMULATOR=1", *meaningful, f"-I{folder}"]


def compilable(text: str, name: str) -> str:
    """Return preprocessed `text` in a form that g++ compiles.

    Each `extern __shared__ T x[];` becomes a pointer to the emulator's shared memory, and each
    `__noinline__` becomes an attribute.
    """

    def define(found: re.Match[str]) -> str:
        before = _TEXT.sub("", text[: found.start()])
        if before.count("{") - before.count("}") - before.count("namespace {") <= 0:
            raise EmulatorError(
                f"{name}: the array of dynamic shared memory `{found[2]}` must be declared inside "
                "the kernel that uses it, not outside of a function"
            )
        lines = "\n" * found[0].count("\n")
        kind = found[1].strip()
        return f"{kind}* const {found[2]} = ({kind}*)::emulator::dynamic_shared();{lines}"

    return _NOINLINE.sub("__attribute__((noinline))", _DYNAMIC.sub(define, text))
