"""`TorchExecutor`: one step of a model over the paged KV cache, on any device.

What a device must know of each started sequence lies in preallocated tables; a step writes what
changed, packs its rows, has them computed and has tokens chosen. Decides nothing about who runs.
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
from gptmanager.executor.out_of_memory import Cuts, failures, joined
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
    """Runs schedules on a torch model: `runner` computes, `chooser` chooses, over the same tables.

    `fused`: context and generation rows run in one pass of the model, otherwise in two. `cuts`: a
    batch that does not fit into memory runs in parts, otherwise it raises. On the CPU
    every call has finished when it returns; on a device nothing waits before `result`, but where
    the chooser says so.
    """

    writes_tokens = True

    def __init__(
        self,
        runner: Runner,
        chooser: Chooser,
        *,
        attention_window: AttentionWindow | None = None,
        fused: bool = True,
        cuts: bool = True,
    ) -> None:
        self.runner = runner
        self.fused = fused
        self.lines = chooser.lines
        self.settles_in_sample = not runner.tokens_on_device
        self._tables = runner.tables
        self._chooser = chooser
        self._gathered = chooser.gathered
        self._window = attention_window
        self._most_scored = max(1, MOST_LOGITS // runner.model.spec.vocab_size)  # tokens at once
        self._cuts: Cuts | None = None
        if cuts:
            self._cuts = Cuts(runner.model.spec.vocab_size, runner.kv_pool.keys.device)
        self._stalled_ns = 0

    def forward(self, schedule: Schedule) -> StepInFlight:
        """Compute the logits of the schedule's rows."""
        before = _off_cpu_ns()
        with self.runner.stream:
            step = self._run_schedule(schedule)
        self._stalled_ns += max(0, _off_cpu_ns() - before)
        return step

    def sample(self, step: StepInFlight) -> None:
        """Choose tokens for each sampling row and make them its sequence's next input."""
        before = _off_cpu_ns()
        with self.runner.stream:
            step.pending = self._chooser.choose(step)
        self._stalled_ns += max(0, _off_cpu_ns() - before)

    def result(self, step: StepInFlight) -> StepResult:
        """Wait for the tokens."""
        if step.pending is None:
            raise RuntimeError("result() of a step that was not sampled")
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
        of_prompts = step.context_logits or step.prompt_log_probs
        if of_prompts or chosen.generation_logits or chosen.log_probs is not None:
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
        """Return True: no thread runs next to the loop."""
        return True

    def mark(self) -> None:
        """Return None: forwards have run, or a stream orders them. See `RankExecutor.mark`."""

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
        return self.runner.memory

    def _run_schedule(self, schedule: Schedule) -> StepInFlight:
        self._load(schedule)
        for start in schedule.starts:
            self._chooser.load(start)
        if schedule.block_copies:
            self.runner.kv_pool.copy(schedule.block_copies)
        with torch.inference_mode():
            return self._compute(schedule)

    def _load(self, schedule: Schedule) -> None:
        """Bring the tables up to date."""
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
        """Logits of the sequences that yield a token, and those of prompts that a host wants."""
        results: list[Computed] = []
        sampled: list[tuple[np.ndarray, np.ndarray]] = []
        of_prompts: list[ContextLogits | PromptLogProbs] = []
        for context, generation in self._batches(schedule):
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
                of_prompts += self._told(part, piece)
        whole, (lines, positions) = results[0], sampled[0]
        if len(results) > 1:
            whole = joined(results)
            lines, positions = map(np.concatenate, zip(*sampled, strict=True))
        choices = _sampling_rows(schedule, lines, positions)
        lost = failures(self.lines, schedule, whole) if whole.lost else ()
        context_logits = tuple(p for p in of_prompts if isinstance(p, ContextLogits))
        prompt_log_probs = tuple(p for p in of_prompts if isinstance(p, PromptLogProbs))
        return StepInFlight(
            *(schedule, choices, whole.logits, context_logits, whole.inputs, lost),
            prompt_log_probs=prompt_log_probs,
        )

    def _told(self, part: ContextPart, logits: Tensor) -> Iterator[ContextLogits | PromptLogProbs]:
        """Yield the logits and log probabilities that hosts ask for, of a part of a prompt."""
        row = part.row
        name = row.request_id, row.epoch, row.position
        if part.num_logits:
            yield ContextLogits(*name, self.runner.bring(logits[: part.num_logits]))
        if part.num_scored and logits.shape[1]:  # else this rank has none
            config, line = self._gathered.config(row.slot), self.lines.of(row.slot)
            behind = slice(row.position + 1, row.position + 1 + part.num_scored)
            targets = self._tables.tokens[line, behind].astype(np.int64)
            count = config.num_prompt_log_probs
            scores = self.runner.score(logits[: part.num_scored], targets, count, config.normalized)
            yield PromptLogProbs(*name, *scores)

    def _batches(self, schedule: Schedule) -> Iterator[tuple[Rows, Rows]]:
        """Context and generation rows that run at once."""
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
        """Logits of the sampled tokens of `rows`; of what does not fit into memory, in parts."""
        try:
            return self.runner.run(rows)
        except (torch.OutOfMemoryError, MemoryError) as error:
            if self._cuts is None:
                raise
            reason = response_text(error)
        # here the error is gone, and with it the tensors that its frames held
        self.runner.relieve()
        return self._cuts.run(rows, reason, self._run)

    def _pack(self, context: Rows, generation: Rows) -> PackedRows:
        """A context runs as one sequence, whatever its beams will be; then each beam is one."""
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
    """Write the tokens that a schedule brings."""
    for start in schedule.starts:
        tables.write_tokens(lines.of(start.slot), 0, start.tokens)
    for fork in schedule.beam_forks:
        tables.fork(lines.of(fork.slot), fork.parents, fork.position)
        for beam, token in enumerate(fork.tokens):
            tables.write_tokens(lines.of(fork.slot, beam), fork.position, (token,))
    for drafts in schedule.drafts:
        tables.write_tokens(lines.of(drafts.slot), drafts.position, drafts.tokens)


def _sampling_rows(schedule: Schedule, lines: np.ndarray, positions: np.ndarray) -> SamplingRows:
    """`lines` and `positions` `[S]`: of the choices."""
    rows, num_generating = schedule.sampling_rows, len(schedule.generation_rows)
    firsts = np.arange(len(rows) + 1)
    if len(lines) > len(rows):  # a context has one choice, whatever its beams will be
        beams = [1] * (len(rows) - num_generating)
        beams += [row.beam_width for row in schedule.generation_rows]
        widths = [width + row.num_drafts for width, row in zip(beams, rows, strict=True)]
        np.cumsum(widths, out=firsts[1:])
    slots = np.array([row.slot for row in rows], dtype=np.int64)
    return SamplingRows(rows, slots, firsts, lines, positions, schedule.drafts)


def _pieces(row: Row, window: AttentionWindow) -> Iterator[tuple[Row, bool]]:
    """Yield the pieces of a context that can run at once, and whether each ends the row.

    No piece overwrites what its own tokens still see. Only the last runs with other rows.
    """
    *early, last = window.pieces(row.position, row.position + row.num_tokens)
    for first, end in early:
        yield row._replace(position=first, num_tokens=end - first, samples=False), False
    yield row._replace(position=last[0], num_tokens=last[1] - last[0]), True


def _off_cpu_ns() -> int:
    """A clock that runs while this thread does not."""
    return perf_counter_ns() - thread_time_ns()
