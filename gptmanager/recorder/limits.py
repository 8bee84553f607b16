"""Limits for the numbers in a recording, so that no small file costs a day or a terabyte to read.

The limits are far above the numbers of any real machine. They do not ensure that a recorded
schedule is correct: a replay checks the schedule.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from gptmanager.assembly.adapter_sizing import MAX_PAGES, AdapterSizes
from gptmanager.assembly.blueprint import Blueprint
from gptmanager.assembly.options import checked_optional_params
from gptmanager.assembly.sizing import Sizes
from gptmanager.config import OptionalParams
from gptmanager.errors import RecordingError
from gptmanager.request.adapter_modules import LORA_MODULE_NAMES
from gptmanager.step import Intake, Row, Schedule, StepResult

_BLOCKS = 1 << 21  # in the pool and the host tier together; each costs 200 bytes of bookkeeping
_TOKENS = 1 << 24  # in a sequence, or in a block, which may hold a whole sequence
_INT32 = (1 << 31) - 1
_TABLES = 1 << 24  # entries of all block tables of one request
_SECONDS = 1e12  # on a monotonic clock

_SIZES = {
    "num_blocks": (1, _BLOCKS),
    "num_host_blocks": (0, _BLOCKS),
    "tokens_per_block": (1, _TOKENS),
    "max_seq_len": (2, _TOKENS),
    "max_input_len": (1, _TOKENS),
    "max_context_length": (1, _INT32),
    "attention_window": (1, _TOKENS),
    "sink_token_length": (0, _TOKENS),
    "num_snapshots": (0, _BLOCKS),
}
_ADAPTER_DTYPES = ("float32", "bfloat16", "float16", "float64")
# options that hold functions or file names
_OF_HOST = (
    *("linear_provider", "logits_post_processor_batched", "on_progress"),
    *("restore_cb", "restore_processor_cb", "recording_path", "black_box_path", "journal_path"),
)
_LOOKUP = {"max_draft_tokens": (1, 1 << 12), "max_ngram": (1, 32), "min_ngram": (1, 32)}


def without_code(blueprint: Blueprint) -> OptionalParams:
    """Return the blueprint's options in the form of a recording: no functions and no file names.

    A recording cannot contain functions, and a reader must not use another machine's file names. Of
    the options that are left out, only `journal_path` affects the schedule: if it is set, contexts
    are by default computed in chunks.
    """
    params = blueprint.params
    chunked, provider = params.enable_chunked_context, params.attention_provider
    if params.journal_path is not None:
        chunked = blueprint.sizes.chunked or chunked
    absent: dict[str, Any] = dict.fromkeys(_OF_HOST)
    return replace(
        params,
        **absent,
        enable_chunked_context=chunked,
        attention_provider=provider if isinstance(provider, str) else "own",
    )


def checked_blueprint(blueprint: Blueprint) -> Blueprint:
    """Check every number of a blueprint, and return it without file names and functions.

    Raise ConfigError for an invalid option, and RecordingError for the first other field that is
    out of range or contradicts another field.
    """
    params = without_code(blueprint)
    checked_optional_params(params)
    sizes = blueprint.sizes
    for name, bounds in _SIZES.items():
        _require(f"sizes.{name}", getattr(sizes, name), *bounds)
    _check_sizes(sizes, params)
    if params.speculative_decoding_config is not None:
        for name, bounds in _LOOKUP.items():
            _require(name, getattr(params.speculative_decoding_config, name), *bounds)
    _require("vocab_size", blueprint.vocab_size, 1, _INT32)
    _require("hidden_size", blueprint.hidden_size, 0, 1 << 20)
    _require("params.max_batch_size", params.max_batch_size, 1, 1 << 20)
    _require("num_slots", blueprint.num_slots, 1, 1 << 21)
    if blueprint.adapters is not None:
        _check_adapters(blueprint.adapters)
    longest = -(-sizes.max_seq_len // sizes.tokens_per_block)
    _require("max_beam_width", blueprint.max_beam_width, 1, min(1 << 10, _TABLES // longest))
    return replace(blueprint, params=params)


def _check_sizes(sizes: Sizes, params: OptionalParams) -> None:
    """Check sizes against the options that `assembly.sizing.size` derives them from."""
    config = params.kv_cache_config
    num_blocks = sizes.num_blocks + sizes.num_host_blocks
    _require("sizes.num_blocks + sizes.num_host_blocks", num_blocks, 1, _BLOCKS)
    longest = params.max_seq_len or sizes.max_seq_len
    _require("sizes.max_seq_len", sizes.max_seq_len, 2, longest)
    _require("sizes.max_input_len", sizes.max_input_len, 1, sizes.max_seq_len - 1)
    size = sizes.max_seq_len if sizes.contiguous else config.tokens_per_block
    _require("sizes.tokens_per_block", sizes.tokens_per_block, size, size)
    if config.max_tokens is not None:
        most = max(1, -(-config.max_tokens // size))
        _require("sizes.num_blocks", sizes.num_blocks, 1, most)
    if not config.enable_block_reuse:
        _require("sizes.num_host_blocks", sizes.num_host_blocks, 0, 0)


def _check_adapters(sizes: AdapterSizes) -> None:
    cache = sizes.cache
    _require("num_host_pages", cache.num_host_pages, 0, MAX_PAGES)
    _require("num_device_pages", cache.num_device_pages, 0, MAX_PAGES)
    _require("page_size", cache.page_size, 1, 1 << 40)
    _require("itemsize", cache.itemsize, 1, 8)
    _require("max_adapter_size", cache.max_adapter_size, 1, 1 << 16)
    _require("num_layers", sizes.num_layers, 1, 1 << 16)
    for module_id, module in sizes.modules:
        _require("module_id", module_id, 0, len(LORA_MODULE_NAMES) - 1)
        for own in module.all_variants:
            _require("input_width", own.input_width, 1, _INT32)
            _require("num_columns", own.num_columns, 1, _INT32)
    if sizes.dtype not in _ADAPTER_DTYPES:
        raise RecordingError(f"adapters.dtype = {sizes.dtype!r} must be one of {_ADAPTER_DTYPES}")


class Bounds:
    """Checks numbers in intakes, schedules and results against limits that a blueprint implies."""

    def __init__(self, blueprint: Blueprint) -> None:
        sizes = blueprint.sizes
        self._tokens = sizes.max_seq_len
        self._blocks = sizes.num_blocks
        self._all_blocks = sizes.num_blocks + sizes.num_host_blocks
        self._table = -(-sizes.max_seq_len // sizes.tokens_per_block) + 1
        self._beams = blueprint.max_beam_width
        self._snapshots = sizes.num_snapshots

    def check(self, intake: Intake, schedule: Schedule | None) -> None:
        """Raise RecordingError for the first number that is impossible with this blueprint."""
        _require("intake.now", intake.now, -_SECONDS, _SECONDS)
        if schedule is not None:
            self._check_schedule(schedule)

    def _check_schedule(self, schedule: Schedule) -> None:
        _require("schedule.iteration", schedule.iteration, 0, _INT32 << 20)
        for row in schedule.rows:
            self._check_row(row)
        for start in schedule.starts:
            _require("orig_prompt_len", start.orig_prompt_len, 1, len(start.tokens))
            _require("len(tokens)", len(start.tokens), 1, self._tokens)
        for append in schedule.block_appends:
            _require("beam", append.beam, 0, self._beams - 1)
            _require("first", append.first, 0, self._table)
            _require_all("block_ids", append.block_ids, self._blocks)
        for copy in schedule.block_copies:
            _require_all("block_copies", (copy.source, copy.destination), self._all_blocks)
        for copied in (*schedule.state_loads, *schedule.state_saves):
            _require("snapshot", copied.snapshot, 0, self._snapshots - 1)
        for fork in schedule.beam_forks:
            _require_all("parents", fork.parents, self._beams)

    def _check_row(self, row: Row) -> None:
        """Check a row with one chain of comparisons, because there are many rows."""
        if not (
            0 <= row.slot <= _INT32
            and 0 <= row.num_drafts < row.num_tokens
            and 0 <= row.position <= row.position + row.num_tokens <= self._tokens
            and 1 <= row.beam_width <= self._beams
        ):
            raise RecordingError(
                f"{row} is invalid: a sequence has at most {self._tokens} tokens, and a request at "
                f"most {self._beams} beams"
            )

    def check_results(self, results: Sequence[StepResult], num_late: int) -> None:
        """Raise RecordingError if a result of an iteration has an invalid number or shape."""
        _require("num_late", num_late, 0, len(results))
        for result in results:
            self._check_result(result)

    def _check_result(self, result: StepResult) -> None:
        _require("result.now", result.now, -_SECONDS, _SECONDS)
        rows, counts = result.tokens, result.num_tokens
        if rows.ndim != 2 and rows.size:
            raise RecordingError("result.tokens must have two dimensions")
        if counts is not None:
            _require("len(result.num_tokens)", len(counts), len(rows), len(rows))
            _require_all("result.num_tokens", counts.tolist(), rows.shape[-1] + 1)
        for beams in result.beams:
            lengths = [*map(len, beams.tokens)]
            if lengths != [*map(len, beams.log_probs)] or len(set(lengths)) != 1 or not lengths[0]:
                raise RecordingError(
                    "each beam of a request must have the same number of candidates, at least 1, "
                    "and as many log probabilities"
                )
            if max(map(max, beams.tokens)) > _INT32 or min(map(min, beams.tokens)) < ~_INT32:
                raise RecordingError("a candidate of a beam must be a token id")


def _require(name: str, value: Any, low: float, high: float) -> None:
    if value is not None and not low <= value <= high:
        raise RecordingError(f"{name} = {value} is outside {low}..{high}")


def _require_all(name: str, values: Iterable[int], end: int) -> None:
    for value in values:
        _require(name, value, 0, end - 1)
