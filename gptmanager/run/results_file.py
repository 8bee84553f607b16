"""Writes result files: JSON lines from `gptmanager run`, in the order of the requests."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import FileIO, RawIOBase
from pathlib import Path
from typing import Any

import orjson
from tokenizers import Tokenizer

from gptmanager.callbacks import GenerationResult, TextStream
from gptmanager.errors import ConfigError, GptManagerError, InvalidRequestError, response_text
from gptmanager.run.requests_file import RequestLine

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
    if tokenizer is not None:
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
    _num_written: int = field(default=0, init=False)

    def add(
        self, line: RequestLine, outcome: GenerationResult | BaseException | None
    ) -> dict[str, Any]:
        """Add the outcome of `line`, and return the entry of the output file for `line`."""
        result = result_line(line, outcome, self.tokenizer)
        self.by_number[line.number] = result
        while self._num_written < len(self.lines):
            known = self.by_number.get(self.lines[self._num_written].number)
            if known is None:
                break
            self._write(known)
        return result

    def close(self) -> None:
        """Write the outcomes that wait for an earlier one."""
        for line in self.lines[self._num_written :]:
            if line.number in self.by_number:
                self._write(self.by_number[line.number])

    def _write(self, result: dict[str, Any]) -> None:
        self._num_written += 1
        line = memoryview(orjson.dumps(result) + b"\n")
        try:
            while self.file is not None and line:
                line = line[self.file.write(line) :]
        except OSError as error:
            is_stdout = self.file is getattr(sys.stdout, "buffer", None)
            name = "-" if is_stdout else getattr(self.file, "name", "")
            self.file = None  # a line after an incomplete line would be misread
            if is_stdout and isinstance(error, BrokenPipeError):  # the reader has what it wanted
                raise
            raise GptManagerError(f"--output {name}: {error.strerror}") from error
