"""`TorchExecutor`: one step of a model over the paged KV cache, on any device.

What a device must know of each started sequence lies in preallocated tables; a step writes what
changed, packs its rows, has them computed and has tokens chosen. Decides nothing about who runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from gptmanager.decoding.lines import Lines
from gptmanager.errors import response_text
from gptmanager.executor.gathered_logits import ContextPart, GatheredLogits, split_context
from gptmanager.executor.out_of_memory import Cuts, failures, joined
from gptmanager.executor.packed_rows import PackedRows, with_drafts
from gptmanager.executor.runner import Computed, Runner
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import SamplingRows, StepInFlight
from gptmanager.executor.token_chooser import TokenChooser
from gptmanager.kv_cache.attention_window import AttentionWindow
from gptmanager.lifecycle.clock import monotonic, perf_counter_ns, thread_time_ns
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.model import Model
from gptmanager.statistics import Memory
from gptmanager.step import ContextLogits, Extras, Failure, Row, Schedule, StepResult

Rows = tuple[Row, ...]


class TorchExecutor:
    """Runs schedules on a torch model: `runner` computes, `chooser` chooses, both over `tables`.

    `fused`: context and generation rows run in one pass of the model, otherwise in two. On the CPU
    every call has finished when it returns; on a device nothing waits before `result`, but where
    the chooser says so.
    """

    def __init__(
        self,
        model: Model,
        kv_pool: KvPool,
        lines: Lines,
        tables: SequenceTables,
        runner: Runner,
        chooser: TokenChooser,
        gathered: GatheredLogits,
        *,
        attention_window: AttentionWindow | None = None,
        fused: bool = True,
    ) -> None:
        self.model = model
        self.kv_pool = kv_pool
        self.fused = fused
        self._lines = lines
        self._tables = tables
        self._runner = runner
        self._chooser = chooser
        self._gathered = gathered
        self._window = attention_window
        self._cuts = Cuts(model.spec.vocab_size, kv_pool.keys.device)
        self._stalled_ns = 0

    def forward(self, schedule: Schedule) -> StepInFlight:
        """Compute the logits of the schedule's rows."""
        stall = _Stall()
        with self._runner.stream:
            self._load(schedule)
            if schedule.block_copies:
                self.kv_pool.copy(schedule.block_copies)
            with torch.inference_mode():
                computed, context_logits = self._compute(schedule)
        rows = self._sampling_rows(schedule)
        self._stalled_ns += stall.nanoseconds()
        lost = failures(self._lines, schedule, computed) if computed.lost else ()
        return StepInFlight(schedule, rows, computed.logits, context_logits, computed.inputs, lost)

    def sample(self, step: StepInFlight) -> None:
        """Choose tokens for each sampling row and make them its sequence's next input."""
        stall = _Stall()
        with self._runner.stream:
            step.pending = self._chooser.choose(step)
        self._stalled_ns += stall.nanoseconds()

    def result(self, step: StepInFlight) -> StepResult:
        """Wait for the tokens."""
        if step.pending is None:
            raise RuntimeError("result() of a step that was not sampled")
        with self._runner.stream:
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
        if step.context_logits or chosen.generation_logits or chosen.log_probs is not None:
            extras = Extras(chosen.log_probs, chosen.generation_logits, step.context_logits)
        return StepResult(
            chosen.tokens,
            monotonic(),
            counts,
            chosen.beams,
            failed,
            stale=bool(step.out_of_memory),
            extras=extras,
        )

    def take_gil_wait_us(self) -> int:
        """Microseconds since the last call in which the loop thread was off the CPU in a step.

        On the CPU a step computes all the time, so wall time beyond the thread's CPU time is time
        spent waiting: for the interpreter lock, or for a core.
        """
        stalled, self._stalled_ns = self._stalled_ns, 0
        return stalled // 1000

    @property
    def memory(self) -> Memory:
        """Bytes of the tensors that it holds, the weights among them."""
        return self._runner.memory

    # What the schedule gave out ----------------------------------------------------------------

    def _load(self, schedule: Schedule) -> None:
        """Bring the tables up to date."""
        lines, tables = self._lines, self._tables
        for start in schedule.starts:
            line = lines.of(start.slot)
            tables.write_tokens(line, 0, start.tokens)
            self._chooser.load(start)
            self._runner.load(line, start.prompt_table)
        if schedule.starts:
            self._gathered.load(schedule.starts)
        for fork in schedule.beam_forks:
            tables.fork(lines.of(fork.slot), fork.parents, fork.position)
            for beam, token in enumerate(fork.tokens):
                tables.write_tokens(lines.of(fork.slot, beam), fork.position, (token,))
        for drafts in schedule.drafts:
            tables.write_tokens(lines.of(drafts.slot), drafts.position, drafts.tokens)
        for append in schedule.block_appends:
            line = lines.of(append.slot, append.beam)
            tables.write_blocks(line, append.first, append.block_ids)

    # From rows to logits -----------------------------------------------------------------------

    def _compute(self, schedule: Schedule) -> tuple[Computed, tuple[ContextLogits, ...]]:
        """Logits of the sequences that yield a token, and those of prompts that a host wants."""
        results: list[Computed] = []
        context_logits: tuple[ContextLogits, ...] = ()
        for context, generation in self._batches(schedule):
            parts: list[ContextPart] = []
            if self._gathered.any_context:
                parts = self._gathered.context_parts(context)
            computed = self._run(self._pack(context, generation, parts))
            if parts:
                logits, brought = split_context(computed.logits, parts, self._runner.bring)
                computed, context_logits = (
                    computed._replace(logits=logits),
                    context_logits + brought,
                )
            results.append(computed)
        whole = results[0] if len(results) == 1 else joined(results)
        return whole, context_logits

    def _batches(self, schedule: Schedule) -> Iterator[tuple[Rows, Rows]]:
        """Context and generation rows that run at once."""
        context, generation = schedule.context_rows, schedule.generation_rows
        if self._window is not None:
            pieces = [piece for row in context for piece in _pieces(row, self._window)]
            context = tuple(piece for piece, is_last in pieces if is_last)
            yield from (((piece,), ()) for piece, is_last in pieces if not is_last)
        if self.fused or not (context and generation):
            yield context, generation
        else:
            yield context, ()
            yield (), generation

    def _run(self, rows: PackedRows) -> Computed:
        """Logits of the sampled tokens of `rows`; of what does not fit into memory, in parts."""
        try:
            return self._runner.run(rows)
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = response_text(error)
        # here the error is gone, and with it the tensors that its frames held
        self._runner.relieve()
        return self._cuts.run(rows, reason, self._run)

    # From a schedule to arrays -----------------------------------------------------------------

    def _sampling_rows(self, schedule: Schedule) -> SamplingRows:
        """The rows that yield a token, and where the tokens to choose stand."""
        finished = tuple(row for row in schedule.context_rows if row.samples)
        rows = (*finished, *schedule.generation_rows)
        slots, lines, starts, counts = self._sequences(finished, schedule.generation_rows)
        positions = starts + counts
        widths = np.ones(len(rows), dtype=np.int64)
        if len(lines) > len(rows):
            widths[len(finished) :] = [row.beam_width for row in schedule.generation_rows]
        if schedule.drafts:
            drafts = np.array([row.num_drafts for row in rows])
            widths += drafts
            lines, positions = with_drafts(lines, positions, np.repeat(drafts, widths - drafts))
        firsts = np.concatenate(([0], np.cumsum(widths)))
        return SamplingRows(rows, slots, firsts, lines, positions, schedule.drafts)

    def _sequences(self, context: Rows, generation: Rows) -> tuple[np.ndarray, ...]:
        """Slot of each row; line, first position and number of tokens of each sequence; int64.

        A context runs as one sequence, whatever its beams will be; in generation each beam is one.
        """
        rows = (*context, *generation)
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        starts = np.array([row.position for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        if self._lines.max_beam_width == 1:
            return slots, slots, starts, counts
        widths = np.array(
            [1] * len(context) + [row.beam_width for row in generation], dtype=np.int64
        )
        beams = np.arange(widths.sum()) - np.repeat(np.cumsum(widths) - widths, widths)
        lines = self._lines.of(slots.repeat(widths), beams)
        return slots, lines, starts.repeat(widths), counts.repeat(widths)

    def _pack(
        self, context: Rows, generation: Rows, parts: Sequence[ContextPart] = ()
    ) -> PackedRows:
        _, lines, starts, counts = self._sequences(context, generation)
        ends = np.cumsum(counts)
        row_starts = np.zeros(len(lines) + 1, dtype=np.int32)
        row_starts[1:] = ends
        num_tokens = int(ends[-1])
        if num_tokens == len(lines):  # one token a sequence
            positions, token_lines = starts, lines
        else:
            positions = np.repeat(starts - (ends - counts), counts) + np.arange(num_tokens)
            token_lines = np.repeat(lines, counts)
        finished = [index for index, row in enumerate(context) if row.samples]
        sample_rows = np.array([*finished, *range(len(context), len(lines))], dtype=np.int64)
        sample_index = ends[sample_rows] - 1
        drafts = [row.num_drafts for row in context]
        drafts += (row.num_drafts for row in generation for _ in range(row.beam_width))
        if any(drafts):
            of_sampled = np.array(drafts)[sample_rows]
            sample_rows, sample_index = with_drafts(sample_rows, sample_index, of_sampled)
        for part in parts:  # behind the rows that sample
            first = ends[part.number] - counts[part.number] + part.first - part.row.position
            sample_index = np.append(sample_index, np.arange(first, first + part.num_tokens))
            sample_rows = np.append(sample_rows, np.full(part.num_tokens, part.number))
        return PackedRows(
            lines,
            row_starts,
            (starts + counts).astype(np.int32),
            positions,
            token_lines,
            sample_index,
            sample_rows,
            len(context),
        )


def _pieces(row: Row, window: AttentionWindow) -> Iterator[tuple[Row, bool]]:
    """What of a context can run at once, and whether it is the end of the row.

    None writes over what its own tokens still see. Only the last runs with other rows.
    """
    *early, last = window.pieces(row.position, row.position + row.num_tokens)
    for first, end in early:
        yield row._replace(position=first, num_tokens=end - first, samples=False), False
    yield row._replace(position=last[0], num_tokens=last[1] - last[0]), True


class _Stall:
    """Time since its making that this thread did not run."""

    def __init__(self) -> None:
        self._wall = perf_counter_ns()
        self._cpu = thread_time_ns()

    def nanoseconds(self) -> int:
        cpu = thread_time_ns() - self._cpu
        return max(0, perf_counter_ns() - self._wall - cpu)
