"""Reads the limits of Linux control groups (v1 and v2), which containers and systemd set.

A process is limited by its own group and by all parent groups.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_UNLIMITED = 1 << 62  # cgroup v1 reports a huge number if memory is not limited


def cpu_quota(root: Path = ROOT) -> float:
    """Return how many cores the groups of this process may use on average; inf without a limit.

    `root`: the folder that contains `proc` and `sys`.
    """
    quotas = [_quota(*_numbers(group / "cpu.max")) for group in _groups(root, "")]
    for group in _groups(root, "cpu"):
        files = (group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us")
        quotas.append(_quota(*(number for file in files for number in _numbers(file))))
    return min(quotas, default=math.inf)


def memory_left(root: Path = ROOT) -> float:
    """Return how many bytes can still be allocated within the limits; inf without a limit.

    Cached pages of files, such as a checkpoint's, count as available.
    """
    left = [
        _left(group, limit, "memory.current", "") for group in _groups(root, "")
        for limit in ("memory.max", "memory.high")
    ]  # fmt: skip
    left += [
        _left(group, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
        for group in _groups(root, "memory")
    ]
    return min(left, default=math.inf)


def _quota(quota: float = math.inf, period: float = 0, *_: float) -> float:
    return quota / period if quota > 0 and period > 0 else math.inf


def _left(group: Path, limit: str, used: str, prefix: str) -> float:
    """Return how many bytes are left in one group; inf without a limit.

    `limit` and `used` are names of files. `prefix`: the prefix of the counters in memory.stat that
    include child groups.
    """
    try:
        (most, *_), (taken, *_) = _numbers(group / limit), _numbers(group / used)
        if most >= _UNLIMITED:
            return math.inf
        lines = (group / "memory.stat").read_text("ascii").splitlines()
        counts = dict(line.split() for line in lines)
        pages = sum(int(counts[f"{prefix}{kind}_file"]) for kind in ("active", "inactive"))
        return max(0.0, most - taken + pages)
    except (OSError, ValueError, KeyError):  # the topmost group has no such files
        return math.inf


def _numbers(file: Path) -> list[float]:
    """Return the numbers in a file, with inf for `max`; [] if the file cannot be read."""
    try:
        words = file.read_text("ascii").split()
        return [math.inf if word == "max" else float(word) for word in words]
    except (OSError, ValueError):
        return []


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's group and its parents, as far as they are mounted.

    `controller`: the name of a controller of v1, for example "cpu"; "" for v2.
    """
    for within, top in _mounts(root, controller):
        path = _path(root, controller)
        if path is None:
            continue
        try:
            folder = top / path.relative_to(within)
        except ValueError:  # the path is in another namespace: use the mounted root
            folder = top
        if ".." in folder.parts or not folder.is_dir():
            folder = top
        yield folder
        while folder != top:
            folder = folder.parent
            yield folder


def _path(root: Path, controller: str) -> Path | None:
    """Return the path of this process's group in the hierarchy of `controller`."""
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if path and controller in controllers.split(","):
            return Path(path)
    return None


def _mounts(root: Path, controller: str) -> Iterator[tuple[Path, Path]]:
    """Yield (path in the hierarchy of `controller`, folder where this path is mounted)."""
    for line in _lines(root / "proc/self/mountinfo"):
        mount, _, system = line.partition(" - ")
        fields, (kind, *more) = mount.split(), [*system.split(), ""]
        is_first = kind == "cgroup" and controller in more[-2].split(",")
        if len(fields) > 4 and (is_first if controller else kind == "cgroup2"):
            within, where = (field.replace("\\040", " ") for field in fields[3:5])
            yield Path(within), root / where.lstrip("/")


def _lines(file: Path) -> list[str]:
    try:
        return file.read_text("utf-8", "replace").splitlines()
    except OSError:
        return []
