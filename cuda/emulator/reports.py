"""Replace the code addresses in the emulator's error reports by source lines.

The emulated machine writes an address as `@0x1234`, relative to the start of the library that
contains the kernel. addr2line of binutils converts addresses to source lines. Frames inside the
emulator's own headers do not help the author of a kernel, so they are skipped if there are other
frames.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

from gptmanager.errors import GptManagerError

_OWN = Path(__file__).resolve().parent
_ADDRESS = re.compile(r"@(0x[0-9a-f]+)")
_FRAME = re.compile(r"^(.*):(\d+)(?: \(discriminator \d+\))?$")


class EmulatorError(GptManagerError):
    """A kernel violates the rules of CUDA, or its launch is invalid."""


def with_lines(text: str, library: Path) -> str:
    """Return `text` with each address replaced by `file:line`, where addr2line finds the line.

    If addr2line is not installed, return `text` unchanged.
    """
    if shutil.which("addr2line") is None:
        return text
    return _ADDRESS.sub(lambda found: _line(found[1], library) or found[0], text)


def _line(address: str, library: Path) -> str | None:
    command = ["addr2line", "--exe", str(library), "--inlines", address]
    frames = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    lines = [match for match in map(_FRAME.match, frames.splitlines()) if match]
    lines = [line for line in lines if not line[1].startswith("?")]
    foreign = [line for line in lines if Path(line[1]).resolve().parent != _OWN]
    for line in foreign or lines:
        return f"{Path(line[1]).name}:{line[2]}"
    return None
