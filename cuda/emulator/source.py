"""From a kernel's CUDA C++ to the C++ that g++ compiles: nothing of the kernel is edited but arrays
of dynamic shared memory, which have no definition on a CPU, and `__noinline__`, which cannot be a
macro, as g++ knows it in attributes. Line numbers stay the kernel's own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from gptmanager.cuda.emulator.reports import EmulatorError

# What `extern __shared__ __align__(16) float x[];` is after the preprocessor.
_DYNAMIC = re.compile(
    r"\bextern\s+__constinit\s+thread_local\s+(?:__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)\s*)?"
    r"([^;{}()\[\]]+?)\b(\w+)\s*\[\s*\]\s*;"
)
_NOINLINE = re.compile(r"\b__noinline__\b(?!\s*[,)])")
_MEANINGFUL = ("-D", "-U", "-I", "-include", "-std=", "--std=")
_TEXT = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'')


def translation_unit(source: str, name: str, kernels: Sequence[str]) -> str:
    """The machine, the kernel's text as file `name`, and a descriptor for each kernel."""
    exports = (f"EMULATOR_EXPORT({i}, {kernel})\n" for i, kernel in enumerate(kernels))
    return (
        '#include "cuda_cpu.h"\n'
        f'#line 1 "{name}"\n{source}\n'
        "#ifdef GPTMANAGER_INTRINSICS\n"
        '#include "intrinsics_cpu.h"\n'
        "#endif\n"
        '#include "export.h"\n'
        '#line 1 "name_expressions"\n'
        f"{''.join(exports)}"
    )


def compiler_options(options: Sequence[str], folder: Path) -> list[str]:
    """Return the NVRTC options that g++ understands: macros, folders, the C++ standard."""
    kept = [
        option.removeprefix("-") if option.startswith("--std") else option for option in options
    ]
    return ["-DGPTMANAGER_EMULATOR=1", *filter(_is_meaningful, kept), f"-I{folder}"]


def _is_meaningful(option: str) -> bool:
    return option.startswith(_MEANINGFUL)


def compilable(text: str, name: str) -> str:
    """Preprocessed `text` with each `extern __shared__ T x[];` as a pointer to machine memory, and
    each `__noinline__` as g++ writes it.
    """

    def define(found: re.Match[str]) -> str:
        before = _TEXT.sub("", text[: found.start()])
        if before.count("{") - before.count("}") - before.count("namespace {") <= 0:
            raise EmulatorError(
                f"{name}: the array of dynamic shared memory `{found[2]}` is declared outside of a "
                "function; the emulator finds it only inside the kernel that uses it"
            )
        lines = "\n" * found[0].count("\n")
        kind = found[1].strip()
        return f"{kind}* const {found[2]} = ({kind}*)::emulator::dynamic_shared();{lines}"

    return _NOINLINE.sub("__attribute__((noinline))", _DYNAMIC.sub(define, text))
