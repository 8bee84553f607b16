"""Runs llama.cpp's benchmark programs, and this library, on the same weights.

Each engine runs alone, in a process of its own. In each round every engine runs once, and the best
value of each figure counts. `llama-bench` times a prompt and one request, and
`llama-batched-bench` times a batch.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import orjson

from gptmanager.bench.load import Source
from gptmanager.bench.peers.gguf_writer import write_gguf
from gptmanager.errors import ConfigError, GptManagerError, error_summary, quoted
from gptmanager.models.checkpoint_parts import gguf_checkpoint

# PROMPT: tokens of the prompt. ALONE: output tokens of one request. BATCH: number of requests, and
# prompt tokens and output tokens of each request.
PROMPT, ALONE, BATCH = 512, 128, (16, 128, 48)
TYPES = ("BF16", "Q8_0", "Q4_0", "Q4_K_M")  # types of llama.cpp's weights; BF16 is not quantized
_OWN: Mapping[str, Mapping[str, Any]] = {
    "bfloat16": {},
    "int8": {"weights_dtype": "int8"},
    "int4": {"weights_dtype": "int4"},
}
CONTEXT, CHUNKS = 512, 12  # for the perplexity: tokens per chunk of the text, and number of chunks
_PROGRAMS = ("llama-bench", "llama-batched-bench", "llama-quantize")
_PERPLEXITY = re.compile(rb"Final estimate: PPL = ([0-9.]+)")
_LIMIT_S = 1800.0  # a program that runs longer fails
_TRIES = 5  # runs of `llama-batched-bench`: some end before the last line is written
_OWN_SCRIPT = (sys.executable, "-m", "gptmanager.bench.peers.own_script")
_NOTE = 300  # characters that are shown, from the end of a program's output
Run = Callable[[], Mapping[str, float]]


def _check_programs(folder: Path, text: Path | None) -> None:
    """Raise ConfigError if the folder lacks a program. `text`: as for `compare`."""
    needed = [*_PROGRAMS, *([] if text is None else ["llama-perplexity"])]
    absent = [name for name in needed if not (folder / name).is_file()]
    if absent:
        raise ConfigError(f"--peer-binary {folder}: the folder has no {', '.join(absent)}")


def compare(
    source: Source,
    programs: Path | None,
    folder: Path,
    *,
    threads: int,
    rounds: int,
    text: Path | None = None,
    on_start: Callable[[str, int, int], None] = lambda name, number, count: None,
) -> dict[str, Any]:
    """Return the report's fields: tokens/s of each engine, and ratios of ours to llama.cpp's.

    `programs`: the folder of llama.cpp's programs; if it is None, only this library runs.
    `folder`: an empty folder for the files. Random weights are written in bfloat16, and each engine
    quantizes them itself. A GGUF file is used as it is. With a file `text`, the report also has the
    perplexity of the text with each engine; `source` must then be a GGUF file. Raise ConfigError
    for options that do not fit together, and GptManagerError if a program fails.
    """
    if programs is not None:
        _check_programs(programs, text)
    if text is not None and isinstance(source, tuple):
        raise ConfigError("--text needs a GGUF file as --model: random weights have no tokenizer")
    own, theirs = _files(source, programs, folder)
    engines: dict[str, Run] = {
        f"gptmanager {name}": _ours(path, params, threads) for name, (path, params) in own.items()
    }
    if programs is not None:
        engines |= {
            f"llama.cpp {name}": _llama_cpp(programs, path, threads)
            for name, path in theirs.items()
        }
    best: dict[str, dict[str, float]] = {}
    order = [name for _ in range(rounds) for name in engines]
    for number, name in enumerate(order):
        on_start(name, number, len(order))
        for key, value in engines[name]().items():
            kept = best.setdefault(name, {})
            kept[key] = round(max(kept.get(key, 0.0), value), 1)
    report: dict[str, Any] = {"engines": best, "loads": _loads()}
    if text is not None:
        report["perplexity"] = _perplexities(text, own, theirs, programs, threads)
    if programs is None:
        why = "llama.cpp is skipped: pass the folder of its programs as --peer-binary"
        return report | {"notes": [why]}
    return report | {"ratios": _ratios(best)}


def _perplexities(
    text: Path,
    own: Mapping[str, tuple[Path, Mapping[str, Any]]],
    theirs: Mapping[str, Path],
    programs: Path | None,
    threads: int,
) -> dict[str, float]:
    """Return the perplexity of a text with each engine."""
    found = {}
    for name, (path, params) in own.items():
        given = {
            **{"model": str(path), "params": params, "threads": threads},
            **{"text": str(text), "context": CONTEXT, "chunks": CHUNKS},
        }
        own_figures = _figures(_call(_OWN_SCRIPT, orjson.dumps(given)))[-1]
        found[f"gptmanager {name}"] = round(own_figures["perplexity"], 4)
    if programs is None:
        return found
    for name, path in theirs.items():
        size = ["-c", CONTEXT, "--chunks", CHUNKS, "-t", threads]
        output = _call([programs / "llama-perplexity", "-m", path, "-f", text, *size])
        match = _PERPLEXITY.search(output)
        if match is None:
            raise GptManagerError(
                f"llama-perplexity printed no estimate: {quoted(output[-_NOTE:])}"
            )
        found[f"llama.cpp {name}"] = float(match[1])
    return found


def _loads() -> dict[str, str]:
    count, prompt, output = BATCH
    return {
        "prompt": f"tokens/s of a prompt of {PROMPT}",
        "alone": f"tokens/s of one request of {ALONE} tokens",
        "batch": f"output tokens/s of {count} requests of {prompt} + {output} tokens",
    }


def _files(
    source: Source, programs: Path | None, folder: Path
) -> tuple[dict[str, tuple[Path, Mapping[str, Any]]], dict[str, Path]]:
    """Return dicts: name -> (file, options) for this library, and type -> file for llama.cpp."""
    if not isinstance(source, tuple):
        if (checkpoint := gguf_checkpoint(source)) is None:
            raise ConfigError("--peer llama-cpp needs a GGUF file as --model, or a --shape")
        return {"as the file": (checkpoint.path, {})}, {"as the file": checkpoint.path}
    base = folder / "BF16.gguf"
    write_gguf(base, source[0], source[1])
    own: dict[str, tuple[Path, Mapping[str, Any]]] = {
        name: (base, {"dtype": "bfloat16", **given}) for name, given in _OWN.items()
    }
    theirs = {"BF16": base}
    for name in TYPES[1:] if programs is not None else ():
        theirs[name] = folder / f"{name}.gguf"
        assert programs is not None
        _call([programs / "llama-quantize", base, theirs[name], name])
    return own, theirs


def _ours(path: Path, params: Mapping[str, Any], threads: int) -> Run:
    given = {
        **{"model": str(path), "params": params, "threads": threads, "rounds": 1},
        **{"prompt": PROMPT, "alone": ALONE, "batch": BATCH},
    }

    def run() -> Mapping[str, float]:
        return _figures(_call(_OWN_SCRIPT, orjson.dumps(given)))[-1]

    return run


def _llama_cpp(programs: Path, path: Path, threads: int) -> Run:
    count, prompt, output = BATCH
    shared = ["-m", path, "-t", threads]
    one = ["-p", PROMPT, "-n", ALONE, "-r", 1, "-o", "jsonl"]
    many = ["-c", 2 * count * (prompt + output), "-npp", prompt, "-ntg", output, "-npl", count]

    def run() -> Mapping[str, float]:
        single = _figures(_call([programs / "llama-bench", *shared, *one]))
        speeds = {"prompt" if row["n_prompt"] else "alone": row["avg_ts"] for row in single}
        command = [programs / "llama-batched-bench", *shared, *many, "--output-format", "jsonl"]
        batch = next(filter(None, (_figures(_call(command)) for _ in range(_TRIES))), None)
        if batch is None:
            raise GptManagerError(f"{command[0]} printed no figures in {_TRIES} runs")
        return speeds | {"batch": count * output / (batch[-1]["t_pp"] + batch[-1]["t_tg"])}

    return run


def _ratios(best: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    ours, others = (
        {name.removeprefix(end): row for name, row in best.items() if name.startswith(end)}
        for end in ("gptmanager ", "llama.cpp ")
    )
    pairs = [(name, other, others[other]) for name in ours for other in others]
    if "int4" in ours:
        pairs.append(("int4", "our int8", ours["int8"]))
    return {
        f"{name} to {other}": {key: round(ours[name][key] / row[key], 2) for key in row}
        for name, other, row in pairs
    }


def _figures(output: bytes) -> list[dict[str, Any]]:
    """Return the JSON objects among the lines that a program printed."""
    try:
        return [orjson.loads(line) for line in output.splitlines() if line.startswith(b"{")]
    except orjson.JSONDecodeError as error:
        end = quoted(output[-_NOTE:])
        raise GptManagerError(f"figures cannot be read: {error_summary(error)}: {end}") from error


def _call(command: Sequence[Any], given: bytes = b"") -> bytes:
    """Run a program and return its output. Raises GptManagerError if it fails or takes too long."""
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, input=given, capture_output=True, timeout=_LIMIT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise GptManagerError(f"{words[0]} failed: {error_summary(error)}") from error
    if done.returncode:
        end = done.stderr[-_NOTE:].decode(errors="replace").strip()
        raise GptManagerError(f"{words[0]} failed with exit status {done.returncode}: {end}")
    return done.stdout + done.stderr  # `llama-batched-bench` may print its figures to either
