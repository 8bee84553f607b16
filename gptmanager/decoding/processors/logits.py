"""Logits post-processors: hosts' functions that change a step's logits before tokens are chosen.

The module decides which processor gets which rows and arguments. If a processor fails, the requests
of its rows end, and all other requests continue.

A processor has one of three forms. A *callable* is called for each row. An object with
`process_batch`, or the callable `batched` of `PostProcessing`, is called once per step with all
rows that share it. A `RowProcessor` is also called once per step, and changes its rows in place in
one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from gptmanager.cuda.device.streams import Stream
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.rows import (
    Errors,
    Ints,
    ModelStream,
    ProcessedSequence,
    RowProcessor,
    Rows,
    RowSession,
    Tokens,
)
from gptmanager.decoding.processors.stream_watch import watched
from gptmanager.errors import CallbackError, RequestError, response_text
from gptmanager.lifecycle.callables import UnfinishedAnswer, check_answer
from gptmanager.lifecycle.clock import perf_counter
from gptmanager.lifecycle.log import logger
from gptmanager.lifecycle.watchdog import CallbackTimer
from gptmanager.request.post_processor import BoundProcessor, RequestProcessor, name_of
from gptmanager.step import SequenceStart


class PostProcessing:
    """The processors of started sequences, and how they are applied to a step.

    `batched` serves sequences without a processor of their own. The calls of each processor that
    take longer than `budget_s` seconds are counted, and the 1st, 2nd, 4th, 8th ... of them is
    logged. `stream` is the stream that computes the logits, or None on the CPU. With
    `watches_streams`, the requests of a processor that works on another stream fail; this check
    waits for the device. `sequences` has the sequences with a processor, by slot.
    """

    def __init__(
        self,
        lines: Lines,
        *,
        batched: Any = None,
        budget_s: float | None = None,
        timer: CallbackTimer | None = None,
        stream: Stream | None = None,
        watches_streams: bool = False,
    ) -> None:
        self._batched = batched
        self._budget_s = budget_s
        self.timer = timer or CallbackTimer("LogitsPostProcessor")
        self._lines = lines
        self._stream = stream
        self._watches_streams = watches_streams
        self.sequences: dict[int, ProcessedSequence] = {}
        self._sessions: WeakKeyDictionary[RowProcessor, RowSession] = WeakKeyDictionary()
        self._overstays: dict[str, int] = {}
        prepare = getattr(batched, "prepare", None)
        if isinstance(batched, BoundProcessor) and callable(prepare):
            where = "cpu" if stream is None else stream.name
            prepare(where).result()  # an error here is raised by the manager's constructor

    def serves(self, slots: Ints) -> bool:
        """Return whether one of these slots has a processor."""
        if self.sequences:
            self._forget_ended()
        return any(slot in self.sequences for slot in slots.tolist())

    def start(self, start: SequenceStart) -> None:
        """Register the processor of a sequence that starts, in place of the slot's previous one."""
        request = start.processor
        if request is None and self._batched is not None:
            request = RequestProcessor(self._batched)
        if request is None or request.post_processor is None:
            self.sequences.pop(start.slot, None)
            return
        sequence = self.sequences[start.slot] = ProcessedSequence(start, request)
        if isinstance(sequence.shared, RowProcessor):
            try:
                for beam in range(start.beam_width):
                    line = self._lines.of(start.slot, beam)
                    self._session(sequence.shared).load(line, sequence.bound)
            except BaseException as error:  # noqa: B036 - no callback may end the loop
                sequence.error = error

    def run(
        self,
        logits: Tensor,
        request_ids: Sequence[int],
        lines: Ints,
        lengths: Ints,
        tokens: Tokens,
        firsts: Ints | None = None,
        token_tensor: Tensor | None = None,
    ) -> dict[int, BaseException]:
        """Call the processors of a step's rows; return the errors by row.

        `logits`, float32 `[S, vocab]` for S beams, are changed in place. The history of beam i is
        the first `lengths[i]` tokens in line `lines[i]` of `tokens` int32 `[num_lines,
        max_seq_len]`. Row r has the beams `firsts[r]` to `firsts[r + 1]` (excluded); if `firsts` is
        None, each row has one beam. `token_tensor` is `tokens` on the logits' device, or None on
        the CPU.
        """
        groups: dict[int, list[int]] = {}
        bounds = range(logits.shape[0] + 1) if firsts is None else firsts.tolist()
        stream = ModelStream(logits.device)
        step = _Step(logits, bounds, lines, lengths, tokens, stream, {}, token_tensor)
        slots = lines if len(bounds) == len(lines) + 1 else lines[list(bounds[:-1])]
        slots = self._lines.slot_of(slots)
        for index, slot in enumerate(slots.tolist()):
            sequence = self.sequences.get(slot)
            if sequence is not None and not sequence.has_ended:
                sequence.request_id = request_ids[index]
                step.sequences[index] = sequence
                if sequence.error is None:
                    groups.setdefault(id(sequence.shared), []).append(index)
        if not step.sequences:
            self._forget_ended()
        with step.stream:
            for members in groups.values():
                shared = step.sequences[members[0]].shared
                self._form(shared)(step, members, shared)
        sequences = step.sequences.items()
        return {index: one.error for index, one in sequences if one.error is not None}

    # Inside --------------------------------------------------------------------------------

    def _form(self, shared: Any) -> Callable[[_Step, list[int], Any], None]:
        if isinstance(shared, RowProcessor):
            return self._run_rows
        if callable(getattr(shared, "process_batch", None)) or shared is self._batched:
            return self._run_batch
        return self._run_each

    def _run_each(self, step: _Step, members: list[int], shared: Any) -> None:
        for index in members:
            sequence = step.sequences[index]
            logits, beams = step.view(index), step.beams(index)
            with _Guard(self, [sequence], shared):
                ids = sequence.request_id, sequence.client_id
                call = functools.partial(shared, ids[0], logits, beams, step.stream, ids[1])
                answer = self._call(call, logits)
                step.replace(logits, answer)
            step.forget_changes(index)

    def _run_batch(self, step: _Step, members: list[int], shared: Any) -> None:
        sequences = [step.sequences[index] for index in members]
        views = [step.view(index) for index in members]
        process = getattr(shared, "process_batch", shared)
        answers: Any = None
        with _Guard(self, sequences, shared):
            call = functools.partial(
                process,
                [sequence.request_id for sequence in sequences],
                list(views),
                [step.beams(index) for index in members],
                step.stream,
                [sequence.client_id for sequence in sequences],
            )
            answers = self._call(call, step.logits)
            if answers is not None and len(answers) != len(members):
                raise _Misuse(f"returned {len(answers)} values for {len(members)} requests")
        for member, index in enumerate(members):
            if answers is not None and step.sequences[index].error is None:
                with _Guard(self, [step.sequences[index]], shared):
                    if isinstance(answers[member], BaseException):
                        raise answers[member]
                    step.replace(views[member], answers[member])
            step.forget_changes(index)

    def _run_rows(self, step: _Step, members: list[int], shared: Any) -> None:
        rows = step.rows(members)  # one for each beam
        errors: Errors = {}
        with _Guard(self, [step.sequences[index] for index in members], shared):
            session = self._session(shared)
            errors = self._call(lambda: session.process(rows), step.logits)
        for index, error in errors.items():
            rows.sequences[index].error = self._request_error(error, shared)

    def _call(self, call: Callable[[], Any], logits: Tensor) -> Any:
        if self._watches_streams:
            answer, wrong = watched(call, logits)
            if wrong:
                raise _Misuse(f"{wrong}: work within `with stream:`")
        else:
            answer = call()
        if answer is not None:
            check_answer("it", answer)
        return answer

    def _session(self, shared: RowProcessor) -> RowSession:
        session = self._sessions.get(shared)
        if session is None:
            session = self._sessions[shared] = shared.open(self._lines.count, self._stream)
        return session

    def fail(
        self, error: BaseException, sequences: Sequence[ProcessedSequence], shared: Any
    ) -> None:
        """Log the error of a call, and end the sequences that the call was for."""
        ended_by = self._request_error(error, shared)
        logger.error(
            "logits_post_processor %s failed; it ends the requests %s",
            *(name_of(shared), [sequence.request_id for sequence in sequences]),
            exc_info=error,
        )
        for sequence in sequences:
            sequence.error = ended_by

    def check_budget(
        self, taken_s: float, sequences: Sequence[ProcessedSequence], shared: Any
    ) -> None:
        """Count a call that exceeded its budget, and log it if the count is a power of two."""
        if self._budget_s is None or taken_s <= self._budget_s:
            return
        name = name_of(shared)
        count = self._overstays[name] = self._overstays.get(name, 0) + 1
        if count & (count - 1) == 0:
            logger.warning(
                "logits_post_processor %s took %.3f s for %d requests (the first: %d), its budget "
                "is %g s (logits_post_processor_budget_s); during the call no token is generated. "
                "It has exceeded its budget %d times",
                *(name, taken_s, len(sequences), sequences[0].request_id, self._budget_s, count),
            )

    @staticmethod
    def _request_error(error: BaseException, shared: Any) -> BaseException:
        """Return a new error that ends a request: the old traceback would keep frames alive."""
        text = f"logits_post_processor {name_of(shared)}"
        if isinstance(error, _Misuse):
            return CallbackError(f"{text} {error}")
        if isinstance(error, UnfinishedAnswer):
            return CallbackError(f"{text}: {error}")
        if isinstance(error, RequestError) and isinstance(shared, RowProcessor):
            return type(error)(f"{text}: {error}")
        return CallbackError(f"{text} raised {response_text(error)}")

    def _forget_ended(self) -> None:
        sequences = self.sequences.items()
        self.sequences = {slot: one for slot, one in sequences if not one.has_ended}


@dataclass(slots=True, eq=False)
class _Guard:
    """Times a call of a processor and catches its errors.

    There may be a call for each row: `contextlib.contextmanager` would be too slow.
    """

    processing: PostProcessing
    sequences: Sequence[ProcessedSequence]
    shared: Any
    started: float = 0.0

    def __enter__(self) -> None:
        self.processing.timer.start()
        self.started = perf_counter()

    def __exit__(self, kind: Any, raised: BaseException | None, traceback: Any) -> bool:
        taken_s = perf_counter() - self.started
        self.processing.timer.stop()
        if raised is not None:
            self.processing.timer.errors += 1
            self.processing.fail(raised, self.sequences, self.shared)
        self.processing.check_budget(taken_s, self.sequences, self.shared)
        return True


class _Misuse(Exception):
    """A processor broke a rule; the text says which."""


@dataclass(slots=True, eq=False)
class _Step:
    """The logits and histories of one step.

    `sequences` has the sequences with a processor, by row.
    """

    logits: Tensor
    bounds: Sequence[int]  # row r has the beams bounds[r] to bounds[r + 1] - 1
    lines: Ints
    lengths: Ints
    tokens: Tokens
    stream: ModelStream
    sequences: dict[int, ProcessedSequence]
    token_tensor: Tensor | None

    def rows(self, members: list[int]) -> Rows:
        """Return all beams of the rows `members`, ascending."""
        sequences = [self.sequences[row] for row in members]
        beams, lines, lengths = members, self.lines, self.lengths
        if len(self.bounds) < len(lines) + 1:
            pairs = [(row, beam) for row in members for beam in self.beams_of(row)]
            sequences = [self.sequences[row] for row, _ in pairs]
            beams = [beam for _, beam in pairs]
        index = np.array(beams, dtype=np.int64)
        if len(beams) < len(lines):
            lines, lengths = lines[index], lengths[index]
        histories = self.token_tensor
        if histories is None:
            histories = torch.from_numpy(self.tokens)
        return Rows(self.logits, index, sequences, lines, lengths, self.tokens, histories)

    def beams_of(self, row: int) -> range:
        """Return the indices of a row's beams in `lines`. A row of a context has one beam."""
        return range(self.bounds[row], self.bounds[row + 1])

    def view(self, row: int) -> Tensor:
        """Return the logits of one row in the shape for callables, `[1, beams, vocab]`."""
        beams = self.beams_of(row)
        return self.logits[beams.start : beams.stop][None]

    def beams(self, row: int) -> list[list[int]]:
        beams = self.beams_of(row)
        lines = self.lines[beams.start : beams.stop]
        return self.sequences[row].beams(self.tokens, lines, int(self.lengths[beams.start]))

    def forget_changes(self, row: int) -> None:
        """Drop the history of a row if a processor has changed the history's length."""
        history = self.sequences[row].history
        if len(history) != self.lengths[self.bounds[row]]:
            history.clear()

    def replace(self, given: Tensor, answer: Any) -> None:
        """Copy the logits that a processor returned (if any) to `given`, the logits it received."""
        if answer is None or answer is given:
            return
        check_answer("it", answer)
        if not isinstance(answer, Tensor):
            raise _Misuse(
                f"returned a value of type {type(answer).__name__}, expected None or a tensor"
            )
        expected = (torch.float32, list(given.shape), self.logits.device)
        found = (answer.dtype, list(answer.shape), answer.device)
        if found != expected:
            raise _Misuse(
                "returned a {} tensor {} on {}, expected {} {} on {}".format(*found, *expected)
            )
        given.copy_(answer)
