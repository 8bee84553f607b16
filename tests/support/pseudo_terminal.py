"""A command on a terminal of its own, with keys to press and a text to wait for."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

CTRL_C, CTRL_D, ENTER = "\x03", "\x04", "\r"
PASTE = "\x1b[200~{}\x1b[201~"  # how a terminal marks what is pasted
# so that Ctrl-C reaches the command, which must lead a session with this terminal
_TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; os.setsid(); fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    "os.execv(sys.argv[1], sys.argv[1:])"
)
_CONTROLS = re.compile(r"\x1b\[[?0-9;]*[A-Za-z]|\r")


class PseudoTerminal:
    """The side of the terminal on which a person sits. `text`: all that was seen."""

    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self.text = ""
        self._master = master
        self._bytes = b""
        self._read = 0  # characters of the text that `wait_for` has passed

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def interrupt_prompt(self) -> None:
        """Press Ctrl-C where a line is read, when the command has slept since the prompt.

        Python's readline sees a signal between its prompt and its `select` with the next key only.
        There, a command that waits for a core of a busy machine is not asleep, but ready to run.
        """
        num_asleep = 0
        while num_asleep < 6:
            time.sleep(0.05)
            state = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            num_asleep = num_asleep + 1 if state == "S" else 0
        self.press(CTRL_C)

    def enter(self, line: str) -> None:
        self.press(line + ENTER)

    def wait_for(self, pattern: str, timeout_s: float = 60.0) -> str:
        """Return the text since the last call, up to the end of a match of `pattern`."""
        deadline = time.monotonic() + timeout_s
        while (found := re.search(pattern, self.text[self._read :])) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.text!r}"
            assert self._receive(0.1), f"no {pattern!r} before the end: {self.text!r}"
        begin, self._read = self._read, self._read + found.end()
        return self.text[begin : self._read]

    def end(self, timeout_s: float = 60.0) -> int:
        """Wait for the end of the command, and return its exit status."""
        deadline = time.monotonic() + timeout_s
        while self._receive(0.1):
            assert time.monotonic() < deadline, self.text
        return self.process.wait(30)

    def _receive(self, timeout_s: float) -> bool:
        """Read what there is. Return False after the end of the command."""
        if not select.select([self._master], [], [], timeout_s)[0]:
            return True
        try:
            new = os.read(self._master, 65536)
        except OSError:  # Linux says EIO when the other side has closed
            return False
        self._bytes += new
        self.text = _CONTROLS.sub("", self._bytes.decode(errors="ignore"))
        return bool(new)


@contextlib.contextmanager
def pseudo_terminal(
    *arguments: Any,
    columns: int = 100,
    folder: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[PseudoTerminal]:
    """Run `gptmanager` with these arguments on a terminal, and kill it at the end of the block."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    command = [sys.executable, "-m", "gptmanager", *map(str, arguments)]
    process = subprocess.Popen(
        [sys.executable, "-c", _TAKE_TERMINAL, *command],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env={
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "TERM": "xterm",
            **(environment or {}),
        },
    )
    os.close(slave)
    try:
        yield PseudoTerminal(master, process)
    finally:
        process.kill()
        process.wait(30)
        os.close(master)
