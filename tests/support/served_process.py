"""A server in a process of its own, whose memory can be measured while clients attack it."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
from child import Child
from hostile_values import allowed_growth, forget_peak, memory_of
from running_server import MODEL

# so that memory that is free goes back to the system, and counts for the request that took it
_ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


class ServedProcess(NamedTuple):
    """`url`: without a slash at its end. `grpc`: host and port, "" without that front."""

    pid: int
    url: str
    grpc: str
    log_path: Path

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @contextlib.contextmanager
    def bounded(self, largest_body: bytes) -> Iterator[None]:
        """What a client sends in this block, one request after the other, makes the server grow by
        no more than it may for the largest of them; afterwards it is as healthy as before.
        """
        before, _ = memory_of(self.pid)
        forget_peak(self.pid)
        yield
        _, peak = memory_of(self.pid)
        growth = peak - before
        assert growth <= allowed_growth(largest_body), f"{growth >> 20} MiB"
        assert httpx.get(f"{self.url}/health").status_code == 200


@contextlib.contextmanager
def served_process(*options: str) -> Iterator[ServedProcess]:
    """`gptmanager serve` over the bundled model; it ends with the block."""
    command = [sys.executable, "-m", "gptmanager", "serve", "--model", str(MODEL), "--port", "0"]
    environment = {**os.environ, **_ALLOCATOR}
    with (
        tempfile.NamedTemporaryFile() as log,  # a pipe that nobody empties would hold it up
        Child([*command, "--threads", "1", *options], stderr=log, env=environment) as process,
    ):
        try:
            told = _welcome(process, Path(log.name))
            url, grpc = re.search(r"at (http\S+)", told), re.search(r"gRPC +(\S+),", told)
            assert url is not None, told
            address = "" if grpc is None else grpc[1]
            yield ServedProcess(process.pid, url[1], address, Path(log.name))
        finally:
            process.terminate()


def _welcome(process: subprocess.Popen[bytes], log: Path) -> str:
    """What it logs until it is ready, or has ended."""
    while True:
        has_ended = process.poll() is not None
        told = log.read_text(errors="replace")
        if has_ended or re.search("^  end.*\n", told, re.MULTILINE):
            return told
        time.sleep(0.02)
