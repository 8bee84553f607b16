"""Writes result files: JSON lines from `gptmanager run`, in the order of the requests."""

from __future__ import annotations

import errno
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from gptmanager.callbacks import GenerationResult, TextStream
from gptmanager.commands.run.requests_file import RequestLine
from gptmanager.errors import ConfigError, GptManagerError, InvalidRequestError, response_text

_COUNTS = (
    "pauses",
    "cached_tokens",
    "prompt_tokens",
    "generated_tokens",
)  # request metrics written as integers


def new_file(option: str, path: Path) -> FileIO:
    """Create or empty the file `path`, and create its folder if needed.

    Raises ConfigError, with a message that names the command-line option `option`.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return path.open("wb", buffering=0)
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror}") from error


def result_line(
    line: RequestLine,
    outcome: GenerationResult | BaseException | None,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return the entry of the output file for `line`. `outcome` is None if no request was sent."""
    result: dict[str, Any] = {"line": line.number, "request_id": line.request_id}
    if line.prompt is not None:
        result["prompt"] = line.prompt
    if not isinstance(outcome, GenerationResult):
        error = outcome or line.error or InvalidRequestError("the request was not submitted")
        return {**result, "error": response_text(error)}
    output_ids = outcome.generated_ids[0]
    if outcome.texts:  # cut before a stop text
        result["text"] = outcome.texts[0]
    elif tokenizer is not None:
        stream = TextStream(tokenizer, outcome.prompt_ids)
        result["text"] = stream.push(output_ids) + stream.flush()
    metrics = outcome.metrics
    return {
        **result,
        "output_ids": output_ids,
        "finish_reason": outcome.finish_reasons[0].name,
        "metrics": {n: int(metrics[n]) if n in _COUNTS else metrics[n] for n in metrics},
    }


@dataclass(slots=True)
class Results:
    """The outcome of each line.

    Outcomes are written to `file` in the order of the lines. Each is written when all earlier
    outcomes are known. `close` writes the outcomes that still wait for an earlier one.
    """

    lines: Sequence[RequestLine]
    tokenizer: Tokenizer | None
    file: RawIOBase | None
    by_number: dict[int, dict[str, Any]] = field(default_factory=dict, init=False)
    _next: int = field(default=0, init=False)  # the index of the line that is written next
    _sizes: list[int] = field(default_factory=list, init=False)  # sizes of written parts

    def add(
        self, line: RequestLine, outcome: GenerationResult | BaseException | None
    ) -> dict[str, Any]:
        """Add the outcome of `line`, and return the entry of the output file for `line`."""
        result = result_line(line, outcome, self.tokenizer)
        self.by_number[line.number] = result
        self._write_known(skips=False)
        return result

    def close(self) -> None:
        """Write the outcomes that wait for an earlier one."""
        self._write_known(skips=True)

    def _write_known(self, *, skips: bool) -> None:
        """Write the next outcomes, and if `skips` also those behind an outcome that is not known.

        If an exception interrupts this call at any point, the next call continues.
        """
        while self._next < len(self.lines):
            known = self.by_number.get(self.lines[self._next].number)
            if known is not None:
                self._write(known)
            elif not skips:
                break
            self._sizes, self._next = [], self._next + 1

    def _write(self, result: dict[str, Any]) -> None:
        line = memoryview(orjson.dumps(result) + b"\n")
        try:
            while self.file is not None and (left := line[sum(self._sizes) :]):
                num_parts = len(self._sizes)
                # one call of C code: no interrupt is between the write and its size
                self._sizes.extend(filter(None, map(self.file.write, (left,))))
                if len(self._sizes) == num_parts:  # a pipe that does not block is full
                    raise BlockingIOError(errno.EAGAIN, "write could not complete without blocking")
        except OSError as error:
            is_stdout = self.file is getattr(sys.stdout, "buffer", None)
            name = "-" if is_stdout else getattr(self.file, "name", "")
            self.file = None  # a line after an incomplete line would be misread
            if is_stdout and isinstance(error, BrokenPipeError):  # the reader has what it wanted
                raise
            raise GptManagerError(f"--output {name}: {error.strerror}") from error
