"""Compile every instantiation of every kernel of the project (`make compile-check`).

    python -m gptmanager.cuda.matrix docs/cuda_kernels.md

compiles them for every architecture, writes a table of registers, spills and shared memory into the
page, and fails if a kernel spills or does not compile. `--arch device` compiles only for the GPU of
this machine, and so fills the cache of compiled kernels for managers, benchmarks and tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import track

from gptmanager.cuda import activations, delta_rule, moe, norms, state_space
from gptmanager.cuda.attention import (
    block_copy,
    cache_write,
    context_attention,
    float_attention,
    generation_attention,
    warpgroup_attention,
)
from gptmanager.cuda.device.compiler import ARCHITECTURES, CompilationError, Figures, compile
from gptmanager.cuda.device.launch import NAMES, Program, architecture
from gptmanager.cuda.gemm import gemm, gemv, gemv_int4, lora
from gptmanager.cuda.sampling import adjustments, beam_step, log_probs, sampling, token_masks
from gptmanager.errors import ConfigError

PROGRAMS: tuple[Program, ...] = (
    norms.PROGRAM,
    gemv.PROGRAM,
    gemv_int4.PROGRAM,
    gemm.PROGRAM,
    lora.PROGRAM,
    activations.PROGRAM,
    moe.PROGRAM,
    delta_rule.PROGRAM,
    state_space.PROGRAM,
    cache_write.PROGRAM,
    block_copy.PROGRAM,
    generation_attention.PROGRAM,
    context_attention.PROGRAM,
    warpgroup_attention.PROGRAM,
    float_attention.PROGRAM,
    token_masks.PROGRAM,
    adjustments.PROGRAM,
    sampling.PROGRAM,
    log_probs.PROGRAM,
    beam_step.PROGRAM,
)


# Programs in which 8-bit floats are weights. Managers refuse these weights on devices without
# instructions that convert 8-bit floats.
_FP8_WEIGHTS = (gemv.PROGRAM, gemm.PROGRAM, moe.PROGRAM)
_FIRST_WITH_FP8 = 89  # the first architecture with these instructions, sm_89
_SLOW = ("sampling/sampling.cu", "sampling/beam_step.cu")  # these are compiled first
Choice = tuple[Program, str, str]  # a kernel of a program, for an architecture


@dataclass(frozen=True)
class Row:
    """The resources that one instantiation of a kernel uses on one architecture."""

    file: str
    kernel: str
    arch: str
    figures: Figures

    @property
    def spills(self) -> bool:
        return bool(self.figures.spill_stores or self.figures.spill_loads)


def compile_all(choices: Iterable[Choice], on_error: Callable[[str], None]) -> Iterator[Row]:
    """Compile each kernel on its own, as for a launch; yield rows in order of `choices`.

    If several kernels are compiled together, inlining, and therefore spills, depend on all of them.
    If a kernel does not compile, `on_error` receives the compiler's message, and the kernel has no
    row.
    """
    return _rows(choices, _compile_one, on_error)


def compile_side_by_side(
    choices: Sequence[Choice], num_workers: int, on_error: Callable[[str], None]
) -> Iterator[Row]:
    """Compile as `compile_all` does, in `num_workers` processes."""
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(num_workers, mp_context=processes) as workers:
        futures = {
            choice: workers.submit(_compile_one, choice)
            for choice in sorted(choices, key=lambda it: it[0].file not in _SLOW)
        }
        yield from _rows(choices, lambda choice: futures[choice].result(), on_error)


def _compile_one(choice: Choice) -> Row:
    program, name, arch = choice
    return Row(program.file, name, arch, compile(program.path, arch, [name]).figures[name])


def _rows(
    choices: Iterable[Choice], row_of: Callable[[Choice], Row], on_error: Callable[[str], None]
) -> Iterator[Row]:
    for choice in choices:
        try:
            yield row_of(choice)
        except CompilationError as error:
            on_error(f"{choice[1]} for {choice[2]}: {error}")


def whole_matrix(arch: str = "", word: str = "") -> Iterator[Choice]:
    """Yield every kernel for every architecture, or only for `arch`.

    With `word`, leave out the kernels that have a dtype, but not `word`, in their name. Kernels for
    weights in 8-bit floats are left out for architectures before sm_89, which never launch them.
    """
    for program in PROGRAMS:
        for own in _architectures(program, arch):
            has_fp8 = program not in _FP8_WEIGHTS or int(own.strip("sm_a")) >= _FIRST_WITH_FP8
            for name in program.kernels:
                if "fp8" in name and not has_fp8:
                    continue
                if word in name or not any(dtype in name for dtype in NAMES.values()):
                    yield program, name, own


def _architectures(program: Program, arch: str) -> tuple[str, ...]:
    """Return the architectures to compile for; a program for Hopper compiles only for Hopper."""
    if not arch:
        return program.architectures
    is_for_all = program.architectures == ARCHITECTURES
    return (arch,) if is_for_all or arch in program.architectures else ()


def table(rows: Iterable[Row]) -> str:
    """Return a Markdown table of the resources of all instantiations, by kernel and element type.

    For each architecture, the table has the range of registers per thread and the largest number of
    spilled bytes. The last column has the largest static shared memory, in bytes.
    """
    most: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    for row in rows:
        name, _, arguments = row.kernel.rstrip(">").partition("<")
        element = arguments.partition(",")[0]
        if element not in NAMES.values():
            element = ""
        element += " fp8" if "fp8" in arguments else ""
        by_arch = most.setdefault((row.file, name, element), {})
        by_arch.setdefault(row.arch, []).append(row)
    head = f"| file | kernel | type | instantiations | {' | '.join(ARCHITECTURES)} | shared |"
    lines = [head, "| " + " | ".join(["---"] * (head.count("|") - 1)) + " |"]
    for (file, name, element), by_arch in most.items():
        count = max(map(len, by_arch.values()))
        registers = [_registers(by_arch.get(arch, [])) for arch in ARCHITECTURES]
        shared = max(row.figures.shared_memory for own in by_arch.values() for row in own)
        cells = [file, name, element.strip("_ "), str(count), *registers, str(shared)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _registers(rows: list[Row]) -> str:
    if not rows:
        return "-"
    registers = {row.figures.registers for row in rows}
    span = f"{min(registers)}-{max(registers)}" if len(registers) > 1 else str(max(registers))
    spilled = max(row.figures.spill_stores + row.figures.spill_loads for row in rows)
    return f"{span}, {spilled} bytes spilled" if spilled else span


def write(page: Path, rows: list[Row]) -> None:
    """Write the table between the page's markers."""
    text = page.read_text("utf-8")
    new = f"<!-- table -->\n{table(rows)}<!-- end -->"
    page.write_text(
        re.sub(r"<!-- table -->.*<!-- end -->", lambda _: new, text, flags=re.S), "utf-8"
    )


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        arch = _device_architecture() if options.arch == "device" else options.arch
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    choices = list(whole_matrix(arch, options.only))
    num_workers = options.workers or len(os.sched_getaffinity(0))
    errors: list[str] = []
    compiled = (
        compile_all(choices, errors.append)
        if num_workers == 1
        else compile_side_by_side(choices, num_workers, errors.append)
    )
    rows = list(track(compiled, "compile", total=len(choices), transient=True))
    if options.page is not None:
        write(options.page, rows)
    spilling = [row for row in rows if row.spills]
    for row in spilling:
        print(f"{row.arch} {row.file} {row.kernel}: {row.figures}")
    num_kernels = len({(row.file, row.kernel) for row in rows})
    print(*errors, sep="\n", end="\n" if errors else "")
    print(
        f"{len(rows)} cubins of {num_kernels} kernels, {len(spilling)} spill, {len(errors)} failed"
    )
    return bool(spilling or errors)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m gptmanager.cuda.matrix")
    add = parser.add_argument
    add("page", nargs="?", type=Path, help="the page to write the table into")
    add("--arch", default="", help="one architecture, as sm_90a, or `device` (default: all)")
    add(
        "--only",
        default="",
        metavar="WORD",
        help="skip kernels with a dtype but not WORD in the name",
    )
    add("--workers", type=int, default=1, help="processes (default 1; 0: one per core)")
    return parser


def _device_architecture() -> str:
    if not torch.cuda.is_available():
        raise ConfigError(f"no CUDA device: torch {torch.__version__} finds none")
    properties = torch.cuda.get_device_properties()
    return architecture(properties.major, properties.minor)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
