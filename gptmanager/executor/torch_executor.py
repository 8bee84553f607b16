"""`TorchExecutor`: one step of a model over the paged KV cache.

Keeps what the device must know of each started sequence in preallocated arrays, a line for each
beam that a slot may have; a step writes what changed and packs its rows. Decides nothing about who
runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gptmanager.decoding.logits import PostProcessing
from gptmanager.decoding.sampling import Sampler
from gptmanager.errors import CapacityError, response_text
from gptmanager.executor.gathered_logits import ContextPart, GatheredLogits, split_context
from gptmanager.executor.packed_rows import PackedRows, halves, with_drafts
from gptmanager.executor.prompt_embeddings import PromptEmbeddings
from gptmanager.executor.sequence_tables import SequenceTables
from gptmanager.executor.step_in_flight import TorchStep
from gptmanager.executor.token_chooser import TokenChooser
from gptmanager.kv_cache.attention_window import AttentionWindow
from gptmanager.lifecycle.clock import monotonic, perf_counter_ns, thread_time_ns
from gptmanager.lifecycle.log import logger
from gptmanager.memory.kv_pool import KvPool
from gptmanager.models.batch import Batch
from gptmanager.models.model import Model
from gptmanager.statistics import Memory
from gptmanager.step import ContextLogits, Failure, Row, Schedule, StepResult


class TorchExecutor:
    """Runs schedules on a torch model; on the CPU every call has finished when it returns.

    `fused`: context and generation rows run in one pass of the model, otherwise in two. Line
    `slot * max_beam_width + beam` of the arrays belongs to a beam.
    """

    def __init__(
        self,
        model: Model,
        kv_pool: KvPool,
        *,
        num_slots: int,
        max_seq_len: int,
        max_beam_width: int = 1,
        attention_window: AttentionWindow | None = None,
        fused: bool = True,
        processing: PostProcessing | None = None,
    ) -> None:
        self.model = model
        self.fused = fused
        self.kv_pool = kv_pool
        self.max_beam_width = max_beam_width
        self._window = attention_window
        num_lines = num_slots * max_beam_width
        self._outputs = GatheredLogits(num_slots)
        self._embeddings = PromptEmbeddings(model.spec.vocab_size)
        blocks_per_sequence = -(-max_seq_len // kv_pool.tokens_per_block)
        self._tables = self._new_tables(num_lines, max_seq_len, blocks_per_sequence)
        self._chooser = self._new_chooser(processing or PostProcessing())
        self._starved: dict[int, str] = {}  # by line, why
        self._num_cuts = 0
        self._stalled_ns = 0

    def forward(self, schedule: Schedule) -> TorchStep:
        stall = _Stall()
        self._starved.clear()  # of a step that raised
        self._load(schedule)
        if schedule.block_copies:
            self.kv_pool.copy(schedule.block_copies)
        finished = tuple(row for row in schedule.context_rows if row.samples)
        rows = (*finished, *schedule.generation_rows)
        lines, starts, counts = self._sequences(finished, schedule.generation_rows)
        positions = starts + counts
        with torch.inference_mode():
            logits, context_logits = self._logits(schedule)
        slots = np.array([row.slot for row in rows], dtype=np.int64)
        widths = np.ones(len(rows), dtype=np.int64)
        if len(lines) > len(rows):
            widths[len(finished) :] = [row.beam_width for row in schedule.generation_rows]
        if schedule.drafts:
            drafts = np.array([row.num_drafts for row in rows])
            widths += drafts
            lines, positions = with_drafts(lines, positions, np.repeat(drafts, widths - drafts))
        firsts = np.concatenate(([0], np.cumsum(widths)))
        self._stalled_ns += stall.nanoseconds()
        step = TorchStep(schedule, rows, slots, firsts, lines, positions, logits, context_logits)
        step.starved = self._take_starved(schedule)
        return step

    def sample(self, step: TorchStep) -> None:
        """Choose tokens for each sampling row and make them its sequence's next input."""
        stall = _Stall()
        self._chooser.choose(step)
        self._stalled_ns += stall.nanoseconds()

    def result(self, step: TorchStep) -> StepResult:
        self._chooser.receive(step)
        if step.tokens is None:
            raise RuntimeError("result() of a step that was not sampled")
        counts = step.counts
        failures: tuple[Failure, ...] = ()
        if step.failed:
            counts = np.ones(len(step.rows), dtype=np.int32) if counts is None else counts
            counts[list(step.failed)] = 0
            failures = tuple(
                Failure(step.rows[place].request_id, error) for place, error in step.failed.items()
            )
        if step.starved:
            lost = {failure.request_id for failure in step.starved}
            counts = np.ones(len(step.rows), dtype=np.int32) if counts is None else counts
            counts[[row.request_id in lost for row in step.rows]] = 0
            failures += step.starved
        return StepResult(
            step.tokens,
            monotonic(),
            counts,
            step.beams,
            failures,
            stale=bool(step.starved),
            extras=step.extras,
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
        pages = self.kv_pool.nbytes + self.kv_pool.host_nbytes
        return Memory(cpu=self.model.nbytes + pages + self._tables.nbytes)

    def _new_chooser(self, processing: PostProcessing) -> TokenChooser:
        sampler = Sampler(len(self._tables.tokens), self.model.spec.vocab_size, self._tables.tokens)
        return TokenChooser(self._tables, sampler, self.max_beam_width, self._outputs, processing)

    def _bring(self, logits: Tensor) -> Tensor:
        """Logits that a host wants, on the CPU by the time of the step's result."""
        return logits

    def _new_tables(
        self, num_lines: int, max_seq_len: int, blocks_per_sequence: int
    ) -> SequenceTables:
        return SequenceTables(num_lines, max_seq_len, blocks_per_sequence)

    def _load(self, schedule: Schedule) -> None:
        """Bring the slots up to date with what the schedule gave out."""
        width, tables = self.max_beam_width, self._tables
        for start in schedule.starts:
            tables.write_tokens(start.slot * width, 0, start.tokens)
            self._chooser.load(start)
            self._embeddings.load(start.slot * width, start.prompt_table)
        self._outputs.load(schedule.starts)
        for fork in schedule.beam_forks:
            first = fork.slot * width
            tables.fork(first, fork.parents, fork.position)
            for beam, token in enumerate(fork.tokens):
                tables.write_tokens(first + beam, fork.position, (token,))
        for drafts in schedule.drafts:
            tables.write_tokens(drafts.slot * width, drafts.position, drafts.tokens)
        for append in schedule.block_appends:
            tables.write_blocks(append.slot * width + append.beam, append.first, append.block_ids)

    def _logits(self, schedule: Schedule) -> tuple[Tensor, tuple[ContextLogits, ...]]:
        """Logits of the sequences that yield a token, and those of prompts that a host wants."""
        context, generation = schedule.context_rows, schedule.generation_rows
        context, early = self._run_early(context)
        parts = self._outputs.context_parts(context)
        if self.fused or not (context and generation):
            logits = self._run(self._pack(context, generation, parts))
            logits, context_logits = split_context(logits, parts, self._bring)
            return logits, early + context_logits
        logits = self._run(self._pack(context, (), parts))
        first, context_logits = split_context(logits, parts, self._bring)
        second = self._run(self._pack((), generation))
        return torch.cat([first, second]), early + context_logits

    def _run_early(
        self, context: tuple[Row, ...]
    ) -> tuple[tuple[Row, ...], tuple[ContextLogits, ...]]:
        """Run all but the ends of rows that are too long to run at once; the rows that are left.

        None writes over what its own tokens still see.
        """
        if self._window is None:
            return context, ()
        left: list[Row] = []
        logits: tuple[ContextLogits, ...] = ()
        for row in context:
            *pieces, rest = self._window.pieces(row.position, row.position + row.num_tokens)
            for first, end in pieces:
                piece = row._replace(position=first, num_tokens=end - first, samples=False)
                parts = self._outputs.context_parts((piece,))
                computed = self._run(self._pack((piece,), (), parts))
                logits += split_context(computed, parts, self._bring)[1]
            left.append(row._replace(position=rest[0], num_tokens=rest[1] - rest[0]))
        return tuple(left), logits

    def _sequences(
        self, context: tuple[Row, ...], generation: tuple[Row, ...]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Line, first position and number of tokens of each sequence, int64 `[R]` each.

        A context runs as one sequence, whatever comes of it; in generation each beam is one.
        """
        rows = (*context, *generation)
        lines = np.array([row.slot for row in rows], dtype=np.int64) * self.max_beam_width
        starts = np.array([row.position for row in rows], dtype=np.int64)
        counts = np.array([row.num_tokens for row in rows], dtype=np.int64)
        if self.max_beam_width == 1:
            return lines, starts, counts
        widths = np.array(
            [1] * len(context) + [row.beam_width for row in generation], dtype=np.int64
        )
        firsts = np.cumsum(widths) - widths
        beams = np.arange(widths.sum()) - np.repeat(firsts, widths)
        return np.repeat(lines, widths) + beams, starts.repeat(widths), counts.repeat(widths)

    def _pack(
        self,
        context: tuple[Row, ...],
        generation: tuple[Row, ...],
        parts: Sequence[ContextPart] = (),
    ) -> PackedRows:
        lines, starts, counts = self._sequences(context, generation)
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
            first = ends[part.place] - counts[part.place] + part.first - part.row.position
            sample_index = np.append(sample_index, np.arange(first, first + part.num_tokens))
            sample_rows = np.append(sample_rows, np.full(part.num_tokens, part.place))
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

    def _run(self, rows: PackedRows) -> Tensor:
        """Logits of the sampled tokens of `rows`; of what does not fit into memory at once, in
        parts. NaN of what does not fit at all, whose lines are noted.
        """
        try:
            return self._compute(rows)
        except (torch.OutOfMemoryError, MemoryError) as error:
            reason = response_text(error)
        # here the error is gone, and with it the tensors that its frames held
        self._relieve()
        parts = halves(rows)
        if not parts:
            self._starved[int(rows.lines[0])] = reason
            shape = len(rows.sample_index), self.model.spec.vocab_size
            return torch.full(shape, torch.nan, device=self.kv_pool.keys.device)
        self._num_cuts += 1
        if self._num_cuts & (self._num_cuts - 1) == 0:
            logger.warning(
                "a batch of %d sequences and %d tokens does not fit into memory and runs in parts; "
                "it is the %d. one (lower max_num_tokens or max_batch_size): %s",
                *(len(rows.lines), rows.row_starts[-1], self._num_cuts, reason),
            )
        results = [(self._run(part), places) for part, places in parts]
        order = np.concatenate([places for _, places in results])
        logits = torch.cat([own for own, _ in results])
        return logits[torch.from_numpy(np.argsort(order))]

    def _compute(self, rows: PackedRows) -> Tensor:
        return self.model.forward(self._batch(rows), self.kv_pool).float()

    def _relieve(self) -> None:
        """Give back memory that is held for later, where that is done."""

    def _take_starved(self, schedule: Schedule) -> tuple[Failure, ...]:
        """The requests of what could not be run since the last call."""
        starved, self._starved = self._starved, {}
        reasons = {line // self.max_beam_width: reason for line, reason in starved.items()}
        rows = (*schedule.context_rows, *schedule.generation_rows) if reasons else ()
        return tuple(
            Failure(row.request_id, CapacityError(f"no memory for one token: {reasons[row.slot]}"))
            for row in rows
            if row.slot in reasons
        )

    def _batch(self, rows: PackedRows) -> Batch:
        token_ids = self._tables.tokens[rows.token_lines, rows.positions].astype(np.int64)
        prompt_index, prompt_embeddings = self._embeddings.take(token_ids, rows.token_lines)
        return Batch(
            token_ids=torch.from_numpy(token_ids),
            positions=torch.from_numpy(rows.positions),
            row_starts=torch.from_numpy(rows.row_starts),
            kv_lengths=torch.from_numpy(rows.kv_lengths),
            slots=torch.from_numpy(rows.lines.astype(np.int32)),
            block_tables=self._tables.block_tensor,
            token_table=self._tables.token_tensor,
            sample_index=torch.from_numpy(rows.sample_index),
            sample_rows=torch.from_numpy(rows.sample_rows),
            num_context_rows=rows.num_context_rows,
            prompt_index=prompt_index,
            prompt_embeddings=prompt_embeddings,
        )


class _Stall:
    """Time since its making that this thread did not run."""

    def __init__(self) -> None:
        self._wall = perf_counter_ns()
        self._cpu = thread_time_ns()

    def nanoseconds(self) -> int:
        cpu = thread_time_ns() - self._cpu
        return max(0, perf_counter_ns() - self._wall - cpu)
