"""`BlackBoxFile`: writes a black box to the path that the host names, or to the temporary folder.

The file contains prompts. In the temporary folder, therefore, only its owner can read it. Before a
process writes its first file there, it deletes the user's black boxes that are older than a week,
and then the oldest of the user's other black boxes, until at most 15 remain.
"""

from __future__ import annotations

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from gptmanager.lifecycle.clock import system_time

_PREFIX, _SUFFIX = "gptmanager-black-box-", ".jsonl"
_MOST_FILES, _MOST_DAYS = 16, 7


class BlackBoxFile:
    """A file that each failure overwrites. Without a `path`, it is in the temporary folder."""

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._given = path
        self._temporary: Path | None = None

    def write(self, text: bytes) -> Path:
        """Write the file, and return where it is."""
        if self._given is not None:
            Path(self._given).write_bytes(text)
            return Path(self._given)
        if self._temporary is None:
            prune_black_boxes(Path(tempfile.gettempdir()))
        descriptor, name = tempfile.mkstemp(_SUFFIX, _PREFIX)
        try:
            with open(descriptor, "wb") as file:
                file.write(text)
        except OSError:  # the disk is full
            os.unlink(name)
            raise
        if self._temporary is None:
            self._temporary = Path(name)
        else:  # replaces the file, or a link that another user has put there
            os.replace(name, self._temporary)
        return self._temporary


def prune_black_boxes(folder: Path) -> None:
    """Remove this user's black boxes that are older than a week, and all but the newest 15."""
    found = []
    for path in folder.glob(f"{_PREFIX}*{_SUFFIX}"):
        with suppress(OSError):  # another process may have just removed it
            status = path.lstat()
            if status.st_uid == os.getuid():
                found.append((status.st_mtime, path))
    oldest = system_time() - _MOST_DAYS * 86400
    for place, (modified, path) in enumerate(sorted(found, reverse=True)):
        if place >= _MOST_FILES - 1 or modified < oldest:
            with suppress(OSError):
                path.unlink()
