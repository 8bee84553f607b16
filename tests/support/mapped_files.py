"""How much of a mapped file is in memory."""

from __future__ import annotations

from pathlib import Path

MAPPINGS = Path("/proc/self/smaps")


def resident_bytes(file: Path) -> int:
    """Return the bytes of the mapped `file` that are in memory; 0 if there is no /proc."""
    mappings = MAPPINGS.read_text().split(f" {file}\n") if MAPPINGS.exists() else []
    return sum(1024 * int(it.split("\nRss:", 1)[1].split()[0]) for it in mappings[1:])
