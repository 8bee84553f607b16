"""`KnownOutputs`: returns the tokens of a simulated step, from the known outputs of a load.

A request without a known output gets tokens that never end it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np

from gptmanager.request.inference_request import InferenceRequest
from gptmanager.simulator.load import Load
from gptmanager.step import BeamCandidates, Row, Schedule

_BEAM_TENSORS = frozenset(("beam_width", "num_return_sequences"))
_NO_BEAMS: Mapping[int, BeamCandidates] = {}
_NO_TOKEN = 2**31 - 1  # follows a known output: never an end_id or a part of a stop word


class KnownOutputs:
    """Returns the tokens of each step.

    `max_rows`: the rows of an array that is allocated in advance. Few steps have more rows.
    """

    def __init__(self, load: Load, max_rows: int) -> None:
        self._load = load
        self._no_tokens = np.full((max_rows, 1), _NO_TOKEN, dtype=np.int32)
        self._outputs: dict[int, tuple[int, Sequence[int]]] = {}  # by id: prompt length, tokens
        # by id: whether the beams are sampled, and their candidates by position
        self._beams: dict[int, tuple[bool, Mapping[int, BeamCandidates]]] = {}
        # whether any request had beams until now; never reset, because a stopped request may still
        # have rows in flight
        self._has_beams = False

    def add(self, number: int, request: InferenceRequest) -> None:
        """Add a request. `number` identifies the request in the load."""
        request_id = request.request_id
        if request_id not in self._beams and not _BEAM_TENSORS.isdisjoint(request.tensors):
            known = self._load.beams(number)
            sampled = "beam_width" not in request.tensors
            if known:  # a sampled beam has a single candidate: the sampled token
                sampled = len(next(iter(known.values())).tokens[0]) == 1
            self._beams[request_id] = sampled, known
            self._has_beams = True
        output = self._load.output(number)
        if output is not None and request_id not in self._outputs:
            prompt_len = int(np.asarray(request.tensors.get("input_ids", ())).size)
            self._outputs[request_id] = prompt_len, output

    def remove(self, request_id: int) -> None:
        self._outputs.pop(request_id, None)
        self._beams.pop(request_id, None)

    def tokens(self, schedule: Schedule) -> tuple[np.ndarray, np.ndarray | None]:
        """Return `tokens` and `num_tokens` of the step's result."""
        if not self._outputs:
            num_rows = sum(row.samples for row in schedule.context_rows)
            num_rows += len(schedule.generation_rows)
            if num_rows > len(self._no_tokens):
                self._no_tokens = np.full((num_rows, 1), _NO_TOKEN, dtype=np.int32)
            return self._no_tokens[:num_rows], None
        if schedule.drafts:
            return self._accepted(schedule)
        tokens = []
        for row in schedule.sampling_rows:
            prompt_len, output = self._outputs.get(row.request_id, (0, ()))
            index = row.position + row.num_tokens - prompt_len
            tokens.append(output[index] if 0 <= index < len(output) else _NO_TOKEN)
        return np.array(tokens, dtype=np.int32).reshape(-1, 1), None

    def _accepted(self, schedule: Schedule) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens of each row, and their number: the accepted drafts and one more token.

        Draft tokens are accepted up to the first that differs from the known output.
        """
        drafts = {draft.slot: draft.tokens for draft in schedule.drafts}
        rows = schedule.sampling_rows
        tokens = np.full((len(rows), 1 + max(map(len, drafts.values()))), _NO_TOKEN, np.int32)
        counts = np.ones(len(rows), dtype=np.int32)
        for index, row in enumerate(rows):
            prompt_len, output = self._outputs.get(row.request_id, (0, ()))
            first = row.position + row.num_tokens - row.num_drafts - prompt_len
            if 0 <= first < len(output):
                drafted = drafts[row.slot][: row.num_drafts] if row.num_drafts else ()
                known = output[first : first + len(drafted) + 1]
                pairs = enumerate(zip(drafted, known, strict=False))
                right = next((n for n, (a, b) in pairs if a != b), min(len(drafted), len(known)))
                tokens[index, : len(known)] = known
                counts[index] = right + 1
        return tokens, counts

    def candidates(self, schedule: Schedule) -> tuple[BeamCandidates, ...]:
        """Return the candidates of each row with several beams."""
        if not self._has_beams:
            return ()
        return tuple(self._of_row(row) for row in schedule.sampling_rows if row.beam_width > 1)

    def _of_row(self, row: Row) -> BeamCandidates:
        sampled, known = self._beams.get(row.request_id, (False, _NO_BEAMS))
        position = row.position + row.num_tokens
        return known.get(position) or _endless(row.beam_width, 1 if sampled else row.beam_width)


@functools.cache
def _endless(beam_width: int, count: int) -> BeamCandidates:
    """Return `count` candidates for each beam; none of these tokens ever ends a beam."""
    tokens = tuple(range(_NO_TOKEN, _NO_TOKEN - count, -1))
    return BeamCandidates((tokens,) * beam_width, ((0.0,) * count,) * beam_width)
