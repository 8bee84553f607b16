"""`TorchExecutor`: runs the steps of a model over the paged KV cache, on any device.

Preallocated tables hold the tokens and the ids of the KV cache blocks of each running sequence. A
step writes its new tokens and blocks to these tables, packs its rows, computes their logits and
chooses tokens. This module does not decide which requests run.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.lines import Lines
from gptmanager.errors import response_text
from gptmanager.executor.choice.gathered_logits import ContextPart, split_context, with_context
from gptmanager.executor.choice.prompt_scores import MOST_LOGITS
from gptmanager.executor.choice.token_chooser import Chooser
from gptmanager.executor.out_of_memory import BatchSplitter, failures, joined
from gptmanager.executor.packed_rows import PackedRows, offsets
from gptmanager.executor.runner import Computed, Runner
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import SamplingRows, StepInFlight
from gptmanager.kv_cache.attention_window import AttentionWindow
from gptmanager.lifecycle.clock import monotonic, perf_counter_ns, thread_time_ns
from gptmanager.statistics import Memory
from gptmanager.step import (
    ContextLogits,
    Extras,
    Failure,
    PromptLogProbs,
    Row,
    Schedule,
    StepResult,
)

Rows = tuple[Row, ...]


class TorchExecutor:
    """Runs schedules on a torch model. `runner` computes logits, and `chooser` chooses tokens.

    If `fused`, the context and generation rows of a step run in one pass of the model, otherwise in
    two. If `splits_batches`, a batch that does not fit into memory runs in parts, otherwise the
    out-of-memory error is raised. On the CPU, `forward` and `sample` return when their work is
    done. On a device, they do not wait for the device, except if `DeviceChooser` chooses tokens on
    the CPU.
    """

    writes_tokens = True

    def __init__(
        self,
        runner: Runner,
        chooser: Chooser,
        *,
        attention_window: AttentionWindow | None = None,
        fused: bool = True,
        splits_batches: bool = True,
    ) -> None:
        self.runner = runner
        self.fused = fused
        self.lines = chooser.lines
        self.settles_in_sample = not runner.tokens_on_device
        self._tables = runner.tables
        self._chooser = chooser
        self._gathered = chooser.gathered
        self._window = attention_window
        self._most_scored = max(1, MOST_LOGITS // runner.model.spec.vocab_size)  # tokens per pass
        self._splitter: BatchSplitter | None = None
        if splits_batches:
            spec, device = runner.model.spec, runner.kv_pool.device
            self._splitter = BatchSplitter(spec.vocab_size, device)
        self._stalled_ns = 0

    def forward(self, schedule: Schedule) -> StepInFlight:
        """Compute the logits of the schedule's rows."""
        before = _off_cpu_ns()
        with self.runner.stream:
            step = self._run_schedule(schedule)
        self._stalled_ns += max(0, _off_cpu_ns() - before)
        return step

    def sample(self, step: StepInFlight) -> None:
        """Choose the tokens of each sampling row and write them as inputs of the next step."""
        before = _off_cpu_ns()
        with self.runner.stream:
            step.pending = self._chooser.choose(step)
        self._stalled_ns += max(0, _off_cpu_ns() - before)

    def result(self, step: StepInFlight) -> StepResult:
        """Wait for the chosen tokens and return the result of the step."""
        if step.pending is None:
            raise RuntimeError("the step was not sampled: call sample() before result()")
        with self.runner.stream:
            chosen = step.pending()
        rows, counts = step.rows.rows, chosen.counts
        failed: tuple[Failure, ...] = ()
        if chosen.failed or step.out_of_memory:
            errors = chosen.failed.items()
            failed = tuple(Failure(rows[index].request_id, error) for index, error in errors)
            failed += step.out_of_memory
            ids = {failure.request_id for failure in failed}
            counts = np.ones(len(rows), dtype=np.int32) if counts is None else counts
            counts[[row.request_id in ids for row in rows]] = 0
        extras = None
        prompt_outputs = step.context_logits or step.prompt_log_probs
        if prompt_outputs or chosen.generation_logits or chosen.log_probs is not None:
            extras = Extras(
                *(chosen.log_probs, chosen.generation_logits, step.context_logits),
                *(chosen.top_log_probs, step.prompt_log_probs),
            )
        return StepResult(
            chosen.tokens,
            monotonic(),
            counts,
            chosen.beams,
            failed,
            stale=bool(step.out_of_memory),
            extras=extras,
        )

    def close(self, timeout_s: float) -> bool:
        """Return True: this executor starts no threads."""
        return True

    def mark(self) -> None:
        """Return None: forward passes have run already, or a stream runs later work after them.

        See `RankExecutor.mark`.
        """

    def take_gil_wait_us(self) -> int:
        """Return for how many microseconds the loop's thread waited in steps since the last call.

        A step on the CPU never sleeps. If its wall time exceeds the CPU time of the thread, the
        thread has spent the difference waiting for the interpreter lock or for a core.
        """
        stalled, self._stalled_ns = self._stalled_ns, 0
        return stalled // 1000

    @property
    def memory(self) -> Memory:
        """Bytes of all tensors in use, including the weights."""
        return self.runner.memory

    def _run_schedule(self, schedule: Schedule) -> StepInFlight:
        self._load(schedule)
        for start in schedule.starts:
            self._chooser.load(start)
        if schedule.block_copies:
            self.runner.kv_pool.copy(schedule.block_copies)
        states, lines = self.runner.kv_pool.states, self.lines  # snapshots follow all lines
        with torch.inference_mode():
            for slot, snapshot in schedule.state_loads:
                states.copy(lines.count + snapshot, lines.of(slot))
            step = self._compute(schedule)
            for slot, snapshot in schedule.state_saves:
                states.copy(lines.of(slot), lines.count + snapshot)
        return step

    def _load(self, schedule: Schedule) -> None:
        """Write the schedule's new sequences, tokens and blocks to the tables."""
        lines, tables = self.lines, self._tables
        for start in schedule.starts:
            line = lines.of(start.slot)
            self.runner.load(line, start.prompt_table, start.adapter_slot, start.beam_width)
        if schedule.starts:
            self._gathered.load(schedule.starts)
        load_tokens(schedule, lines, tables)
        for append in schedule.block_appends:
            line = lines.of(append.slot, append.beam)
            tables.write_blocks(line, append.first, append.block_ids)

    def _compute(self, schedule: Schedule) -> StepInFlight:
        """Compute the logits to sample from, and the prompt outputs that requests ask for."""
        results: list[Computed] = []
        sampled: list[tuple[np.ndarray, np.ndarray]] = []
        context_logits: list[ContextLogits] = []
        prompt_log_probs: list[PromptLogProbs] = []
        for context, generation in self._batches(schedule):
            if results:  # copy the logits: all captured steps write to the same memory
                results[-1] = results[-1]._replace(logits=results[-1].logits.clone())
            rows = self._pack(context, generation)
            index = rows.sample_index
            sampled.append((rows.token_lines[index], rows.positions[index] + 1))
            parts = self._gathered.context_parts(context) if self._gathered.any_context else ()
            if not parts:
                results.append(self._run(rows))
                continue
            computed = self._run(with_context(rows, parts))
            logits, pieces = split_context(computed.logits, parts)
            results.append(computed._replace(logits=logits))
            for part, piece in zip(parts, pieces, strict=True):
                if part.num_logits:
                    context_logits.append(self._context_logits(part, piece))
                if part.num_scored and piece.shape[1]:  # some ranks have no logits
                    prompt_log_probs.append(self._prompt_log_probs(part, piece))
        whole, (lines, positions) = results[0], sampled[0]
        if len(results) > 1:
            whole = joined(results)
            lines, positions = map(np.concatenate, zip(*sampled, strict=True))
        choices = _sampling_rows(schedule, lines, positions)
        lost = failures(self.lines, schedule, whole) if whole.lost else ()
        return StepInFlight(
            *(schedule, choices, whole.logits, tuple(context_logits), whole.inputs, lost),
            prompt_log_probs=tuple(prompt_log_probs),
        )

    def _context_logits(self, part: ContextPart, logits: Tensor) -> ContextLogits:
        row, logits = part.row, self.runner.to_cpu(logits[: part.num_logits])
        return ContextLogits(row.request_id, row.epoch, row.position, logits)

    def _prompt_log_probs(self, part: ContextPart, logits: Tensor) -> PromptLogProbs:
        row = part.row
        config, line = self._gathered.config(row.slot), self.lines.of(row.slot)
        scored = slice(row.position + 1, row.position + 1 + part.num_scored)
        targets = self._tables.tokens[line, scored].astype(np.int64)
        count = config.num_prompt_log_probs
        scores = self.runner.score(logits[: part.num_scored], targets, count, config.normalized)
        return PromptLogProbs(row.request_id, row.epoch, row.position, *scores)

    def _batches(self, schedule: Schedule) -> Iterator[tuple[Rows, Rows]]:
        """Yield (context rows, generation rows) of each pass of the model."""
        most = self._most_scored
        context, generation = schedule.context_rows, schedule.generation_rows
        if self._window is not None:
            pieces = [piece for row in context for piece in _pieces(row, self._window)]
            context = tuple(piece for piece, is_last in pieces if is_last)
            for early in [piece for piece, is_last in pieces if not is_last]:
                yield from ((batch, ()) for batch in self._gathered.batches((early,), most))
        if self._gathered.any_context:
            *batches, context = self._gathered.batches(context, most)
            yield from ((batch, ()) for batch in batches)
        if self.fused or not (context and generation):
            yield context, generation
        else:
            yield context, ()
            yield (), generation

    def _run(self, rows: PackedRows) -> Computed:
        """Run the model. Rows that do not fit into memory run in parts if batches may be split."""
        try:
            return self.runner.run(rows)
        except (torch.OutOfMemoryError, MemoryError) as error:
            if self._splitter is None:
                raise
            reason = response_text(error)
        # Within the except clause, the error would keep the tensors of its frames alive.
        self.runner.relieve()
        return self._splitter.run(rows, reason, self._run)

    def _pack(self, context: Rows, generation: Rows) -> PackedRows:
        """Pack context rows as one sequence each, and generation rows as one sequence per beam."""
        rows = (*context, *generation)
        lines = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.position for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        drafts = [row.num_drafts for row in rows]
        widths: np.ndarray | int = 1
        if self.lines.max_beam_width > 1:
            widths = np.array([1] * len(context) + [row.beam_width for row in generation])
            lines = self.lines.of(lines.repeat(widths), offsets(widths))
            starts, counts = starts.repeat(widths), counts.repeat(widths)
        ends = np.cumsum(counts)
        row_starts = np.zeros(len(lines) + 1, dtype=np.int32)
        row_starts[1:] = ends
        positions, token_lines = starts, lines
        if ends[-1] > len(lines):
            positions, token_lines = starts.repeat(counts) + offsets(counts), lines.repeat(counts)
        finished = [index for index, row in enumerate(context) if row.samples]
        sample_rows = np.array([*finished, *range(len(context), len(lines))], dtype=np.int64)
        sample_index = ends[sample_rows] - 1
        if any(drafts):
            drafted = np.array(drafts).repeat(widths)[sample_rows]
            sample_index = (sample_index - drafted).repeat(drafted + 1) + offsets(drafted + 1)
            sample_rows = sample_rows.repeat(drafted + 1)
        return PackedRows(
            *(lines, row_starts, (starts + counts).astype(np.int32), positions, token_lines),
            *(sample_index, sample_rows, len(context)),
        )


def load_tokens(schedule: Schedule, lines: Lines, tables: SequenceTables) -> None:
    """Write the tokens of a schedule's starts, beam forks and drafts to the tables."""
    for start in schedule.starts:
        tables.write_tokens(lines.of(start.slot), 0, start.tokens)
    for fork in schedule.beam_forks:
        tables.fork(lines.of(fork.slot), fork.parents, fork.position)
        for beam, token in enumerate(fork.tokens):
            tables.write_tokens(lines.of(fork.slot, beam), fork.position, (token,))
    for drafts in schedule.drafts:
        tables.write_tokens(lines.of(drafts.slot), drafts.position, drafts.tokens)


def _sampling_rows(schedule: Schedule, lines: np.ndarray, positions: np.ndarray) -> SamplingRows:
    """Return the rows for which tokens are chosen.

    `lines` and `positions` say where in the tables the token of each choice belongs.
    """
    rows, num_generating = schedule.sampling_rows, len(schedule.generation_rows)
    firsts = np.arange(len(rows) + 1)
    if len(lines) > len(rows):  # a context has one choice for all its beams
        beams = [1] * (len(rows) - num_generating)
        beams += [row.beam_width for row in schedule.generation_rows]
        widths = [width + row.num_drafts for width, row in zip(beams, rows, strict=True)]
        np.cumsum(widths, out=firsts[1:])
    slots = np.array([row.slot for row in rows], dtype=np.int64)
    return SamplingRows(rows, slots, firsts, lines, positions, schedule.drafts)


def _pieces(row: Row, window: AttentionWindow) -> Iterator[tuple[Row, bool]]:
    """Split a context row into pieces, and yield (piece, whether it is the last) for each.

    With an attention window, the cache is cyclic. The pieces are so short that none overwrites keys
    to which its own tokens still attend. Only the last piece runs together with other rows.
    """
    *early, last = window.pieces(row.position, row.position + row.num_tokens)
    for first, end in early:
        yield row._replace(position=first, num_tokens=end - first, samples=False), False
    yield row._replace(position=last[0], num_tokens=last[1] - last[0]), True


def _off_cpu_ns() -> int:
    """Return the time of a clock that advances only while this thread is off the CPU."""
    return perf_counter_ns() - thread_time_ns()
