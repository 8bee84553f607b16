"""Every kernel of the project in every instantiation: what `make compile-check` compiles.

    python -m gptmanager.cuda.matrix docs/cuda_kernels.md

compiles all for every architecture, writes the table of registers, spills and shared memory, and
fails if one spills.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.progress import track

from gptmanager.cuda import (
    activations,
    adjustments,
    beam_step,
    block_copy,
    cache_write,
    context_attention,
    float_attention,
    generation_attention,
    log_probs,
    lora,
    norms,
    products,
    sampling,
    tiled_products,
    token_masks,
    warpgroup_attention,
)
from gptmanager.cuda.compiler import ARCHITECTURES, Figures, compile
from gptmanager.cuda.launch import NAMES, Program

PROGRAMS: tuple[Program, ...] = (
    norms.PROGRAM,
    products.PROGRAM,
    tiled_products.PROGRAM,
    lora.PROGRAM,
    activations.PROGRAM,
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


@dataclass(frozen=True)
class Row:
    """What one instantiation uses on one architecture."""

    file: str
    kernel: str
    arch: str
    figures: Figures

    @property
    def spills(self) -> bool:
        return bool(self.figures.spill_stores or self.figures.spill_loads)


def compile_all(choices: Iterable[tuple[Program, str, str]]) -> Iterator[Row]:
    """Compile kernels of programs for architectures, each by itself, as it is for a launch: what
    is inlined, and so what spills, depends on what else calls it.
    """
    for program, name, arch in choices:
        cubin = compile(program.path, arch, [name])
        yield Row(program.file, name, arch, cubin.figures[name])


def whole_matrix() -> Iterator[tuple[Program, str, str]]:
    return (
        (program, name, arch)
        for program in PROGRAMS
        for arch in program.architectures
        for name in program.kernels
    )


def table(rows: Iterable[Row]) -> str:
    """A line for each kind of kernel: the most that any of its instantiations uses."""
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
    """Put the table between the page's markers."""
    text = page.read_text("utf-8")
    new = f"<!-- table -->\n{table(rows)}<!-- end -->"
    page.write_text(
        re.sub(r"<!-- table -->.*<!-- end -->", lambda _: new, text, flags=re.S), "utf-8"
    )


def main(arguments: list[str]) -> int:
    choices = list(whole_matrix())
    rows = list(compile_all(track(choices, "compile", transient=True)))
    if arguments:
        write(Path(arguments[0]), rows)
    spilling = [row for row in rows if row.spills]
    for row in spilling:
        print(f"{row.arch} {row.file} {row.kernel}: {row.figures}")
    num_kernels = len({(row.file, row.kernel) for row in rows})
    print(f"{len(rows)} cubins of {num_kernels} kernels, {len(spilling)} spill")
    return bool(spilling)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
