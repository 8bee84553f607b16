"""`JsonLinesSink`: writes statistics to a file, one record on each line, rotated by size."""

from __future__ import annotations

import io
import logging
import os
import threading
from pathlib import Path

from gptmanager.arguments import at_least

_logger = logging.getLogger(__name__)


class JsonLinesSink:
    """A ReturnBatchManagerStats callback that appends each record to `path`.

    Each record reaches the operating system before the call returns, so a crash of the process
    loses none. If a crash or a full disk truncated a line, the next record begins on a new line.
    Before the file grows over `max_bytes`, it is renamed to `path.1`, the old `path.1` to `path.2`,
    and so on. At most `backups` renamed files are kept. By default the size is not limited. A
    single record over `max_bytes` is written to a file of its own. If another program moves,
    deletes or truncates the file, as logrotate does, the next record is still written to `path`.

    A call never raises. A record that cannot be written is counted in `num_dropped`. If several
    records in a row cannot be written, only the first failure is logged. The constructor raises
    OSError if the file cannot be opened. A sink is thread-safe, so several managers may share it.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, max_bytes: int | None = None, backups: int = 3
    ) -> None:
        self._path = Path(path)
        self._max_bytes = None if max_bytes is None else at_least(1, "max_bytes", max_bytes)
        self._backups = at_least(0, "backups", backups)
        self._lock = threading.Lock()
        self._is_failing = False
        self._is_closed = False
        self._is_torn = False  # the file ends within a line
        self._size = 0
        self.num_dropped = 0
        self._file: io.FileIO | None = self._open()

    def __call__(self, record: str) -> None:
        # JSON has line breaks between tokens only
        line = record.replace("\r", " ").replace("\n", " ") + "\n"
        with self._lock:
            try:
                self._append(line.encode())
                self._is_failing = False
            except (OSError, ValueError) as error:
                self.num_dropped += 1
                if not self._is_failing:
                    self._is_failing = True
                    _logger.warning("statistics cannot be written to %s: %s", self._path, error)

    def close(self) -> None:
        """Close the file; later records are dropped. Idempotent."""
        with self._lock:
            self._is_closed = True
            if self._file is not None:
                self._file.close()
                self._file = None

    def __enter__(self) -> JsonLinesSink:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> io.FileIO:
        # unbuffered: `write` returns how much of a record was written
        file = io.FileIO(self._path, "a+")
        self._identity = os.fstat(file.fileno())
        self._size = file.seek(0, os.SEEK_END)
        if self._size:
            file.seek(-1, os.SEEK_END)
            self._is_torn = file.read(1) != b"\n"
        else:
            self._is_torn = False
        return file

    def _is_at_path(self) -> bool:
        """Return whether the open file is still the file at `path`, and update `_size`."""
        try:
            found = os.stat(self._path)
        except FileNotFoundError:
            return False
        self._size = found.st_size
        self._is_torn = self._is_torn and self._size > 0
        return os.path.samestat(found, self._identity)

    def _append(self, line: bytes) -> None:
        if self._is_closed:
            raise ValueError("the sink is closed")
        if self._file is not None and not self._is_at_path():
            self._file.close()
            self._file = None
        if self._file is None:  # also after a failed rotation
            self._file = self._open()
        if self._max_bytes is not None and 0 < self._size > self._max_bytes - len(line):
            self._file.close()
            self._file = None
            self._rotate()
            self._file = self._open()
        if self._is_torn:
            line = b"\n" + line
        self._is_torn = True
        while line:
            written = self._file.write(line)
            self._size += written
            line = line[written:]
        self._is_torn = False

    def _rotate(self) -> None:
        if self._backups == 0:
            self._path.unlink()
            return
        for number in range(self._backups - 1, 0, -1):
            if self._backup(number).exists():
                self._backup(number).replace(self._backup(number + 1))
        self._path.replace(self._backup(1))

    def _backup(self, number: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{number}")
