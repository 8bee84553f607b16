"""The values that loop, executor and host exchange, and the protocols `Executor` and `Host`.

All values are frozen. Every nondeterministic input is in an `Intake` or a `StepResult`, so a
recording of these can be replayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from gptmanager.kv_cache.block import BlockCopy
from gptmanager.kv_cache.state_snapshots import StateCopy
from gptmanager.peft_cache.work import AdapterDone, AdapterWork
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.request.input_rows import HostRows
from gptmanager.request.output_options import NO_EXTRAS, OutputConfig
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.statistics import Counts, PhaseTimes

# values in place of the token of a row, if no token can be sampled
NO_TOKEN = -1  # all logits are -inf
NOT_FINITE = -2  # a logit is NaN or +inf


class Failure(NamedTuple):
    """A failure that ends the request `request_id`, for example an error in a callback."""

    request_id: int
    error: BaseException


class Progress(NamedTuple):
    """The progress of a request that continues after its process has died.

    `tokens`: the output tokens that are kept, with their `log_probs` if the request asks for them.
    `num_sent`: how many output tokens the host has received. `age_s`: seconds since the request was
    accepted. `renews_adapter`: whether the adapter with the request's `lora_task_id` was forgotten
    after an earlier request had used it.
    """

    request_id: int
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    num_sent: int
    age_s: float
    renews_adapter: bool = False


@dataclass(frozen=True, slots=True)
class Intake:
    """All input of one iteration. `now` is in seconds of a monotonic clock.

    `requests`: new requests. `stops`: ids of requests to stop. `ready`: ids of requests with a
    logits post-processor that has become ready. `failures`: failures of callbacks, preparations and
    steps since the last intake. `clears_cache`: the weights were replaced, so cached blocks are
    dropped.
    `adapters`: finished work on adapters. `forgotten_adapters`: task ids of adapters to remove from
    the cache. `resumed`: the progress of all `requests`, if they are from a journal. `recomputes`:
    running requests compute their contexts again, with the new weights.
    """

    now: float
    requests: tuple[InferenceRequest, ...] = ()
    stops: frozenset[int] = frozenset()
    ready: tuple[int, ...] = ()
    failures: tuple[Failure, ...] = ()
    clears_cache: bool = False
    adapters: tuple[AdapterDone, ...] = ()
    forgotten_adapters: tuple[int, ...] = ()
    resumed: tuple[Progress, ...] = ()
    recomputes: bool = False


class Row(NamedTuple):
    """One request in one step, which computes `num_tokens` positions from `position` on.

    `samples`: whether a token is chosen for the row. It is False for all context chunks but the
    last. `epoch` distinguishes the starts of a request, so that a result is never used for a later
    start. In the context phase the beams of a request share one sequence; in generation there are
    `beam_width` sequences. The last `num_drafts` tokens are drafts; up to `num_drafts` + 1 tokens
    are chosen for a row with drafts.
    """

    request_id: int
    epoch: int
    slot: int
    position: int
    num_tokens: int
    samples: bool
    beam_width: int = 1
    num_drafts: int = 0


class SequenceStart(NamedTuple):
    """The start of a sequence in a slot, with everything that the executor needs to run it.

    `tokens`: the host's prompt, which has `orig_prompt_len` tokens, and then the tokens generated
    before a pause. `processor`: the request's own logits post-processor. `draft_logits`: the drafts
    that the host sampled, as rows of `drawn_draft`. `sampled`: beams are sampled in parallel, not
    searched. `num_candidates`: candidates per beam; fewer if the vocabulary is smaller.
    `adapter_slot`: index of the sequence's adapter in the kernels' table; -1 without an adapter.
    """

    slot: int
    tokens: tuple[int, ...]
    orig_prompt_len: int
    sampling: SamplingParams
    processor: RequestProcessor | None = None
    client_id: int | None = None
    output_config: OutputConfig = NO_EXTRAS
    prompt_table: HostRows | None = None
    beam_width: int = 1
    draft_logits: HostRows | None = None
    sampled: bool = False
    num_candidates: int = 1
    adapter_slot: int = -1


class BlockAppend(NamedTuple):
    """Blocks to write to the block table of a beam of the sequence in `slot`.

    `first`: the index of the first of these blocks in the table. After a fork it is 0, because the
    whole table of the beam changes.
    """

    slot: int
    first: int
    block_ids: tuple[int, ...]
    beam: int = 0


class BeamFork(NamedTuple):
    """Beam i of the sequence in `slot` continues beam `parents[i]`, with token `tokens[i]`.

    `position`: the position of that token.
    """

    slot: int
    position: int
    parents: tuple[int, ...]
    tokens: tuple[int, ...]


class Drafts(NamedTuple):
    """Tokens drafted for the sequence in `slot`, the first of them at `position`."""

    slot: int
    position: int
    tokens: tuple[int, ...]


class BeamCandidates(NamedTuple):
    """The best continuations of each beam of a request: one list per beam, in descending order.

    In a beam search each list has `SequenceStart.num_candidates` tokens, or the whole vocabulary if
    it is smaller. After the context there is only one list, for the prompt. If beams are sampled,
    each beam has a list with its sampled token, even after the context. `log_probs` have single
    precision.

    A NaN or +inf logit of a searched beam makes NOT_FINITE the only candidate of the request. Each
    sampled beam may have NOT_FINITE or NO_TOKEN in place of its token.
    """

    tokens: tuple[tuple[int, ...], ...]
    log_probs: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The decisions of one iteration, including memory; context rows precede generation rows.

    `block_copies` run first, in order, before the rows write to any block. `paused`: ids of paused
    requests. The first row of a sequence may have a position above 0, if its blocks already have
    the keys and values of the positions before.

    `state_loads` copy snapshots of recurrent states to the slots of `starts`, before the rows run.
    `state_saves` copy the states of slots to snapshots, after all rows have run.
    """

    iteration: int
    context_rows: tuple[Row, ...] = ()
    generation_rows: tuple[Row, ...] = ()
    starts: tuple[SequenceStart, ...] = ()
    block_appends: tuple[BlockAppend, ...] = ()
    block_copies: tuple[BlockCopy, ...] = ()
    beam_forks: tuple[BeamFork, ...] = ()
    drafts: tuple[Drafts, ...] = ()
    paused: tuple[int, ...] = ()
    micro_batch_id: int = 0
    state_loads: tuple[StateCopy, ...] = ()
    state_saves: tuple[StateCopy, ...] = ()

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows, in the order of the step."""
        return (*self.context_rows, *self.generation_rows)

    @property
    def num_context_tokens(self) -> int:
        """The number of tokens in all context rows."""
        return sum(row.num_tokens for row in self.context_rows)

    @property
    def num_sampling_rows(self) -> int:
        """The number of `sampling_rows`."""
        return sum(row.samples for row in self.context_rows) + len(self.generation_rows)

    @property
    def sampling_rows(self) -> tuple[Row, ...]:
        """The rows for which tokens are chosen, in the order of a result's rows."""
        return (*(row for row in self.context_rows if row.samples), *self.generation_rows)


class ContextLogits(NamedTuple):
    """Float32 logits `[n, vocab]` of a prompt's positions from `position` on."""

    request_id: int
    epoch: int
    position: int
    logits: Tensor


class TopLogProbs(NamedTuple):
    """The k most probable tokens at the place of each of the n tokens chosen for a row.

    `row`: index of the row. `log_probs` float32 and `ids` int32 `[n, k]`, best first.
    """

    row: int
    log_probs: np.ndarray
    ids: np.ndarray


class PromptLogProbs(NamedTuple):
    """Log probabilities of the n prompt tokens after `position`, float32 `[n]`.

    `top_log_probs` float32 and `top_ids` int32 `[n, k]`: the k most probable tokens at each of
    these positions, best first.
    """

    request_id: int
    epoch: int
    position: int
    log_probs: Tensor
    top_log_probs: Tensor
    top_ids: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Extras:
    """The outputs of a step besides tokens, on the CPU.

    `log_probs` float32 `[rows, n]`: log probabilities of `StepResult.tokens`, only valid for rows
    that ask for them. `generation_logits`: pairs of a row's index and its logits, float32
    `[n, vocab]`.
    """

    log_probs: np.ndarray | None = None
    generation_logits: tuple[tuple[int, Tensor], ...] = ()
    context_logits: tuple[ContextLogits, ...] = ()
    top_log_probs: tuple[TopLogProbs, ...] = ()
    prompt_log_probs: tuple[PromptLogProbs, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """The result of a step, with a row for each of `Schedule.sampling_rows`.

    `tokens` int32 `[rows, n]`. `num_tokens` int32 `[rows]`: the number of valid tokens of each row,
    or None if all are valid. The last valid token may be NO_TOKEN or NOT_FINITE. `now`: the time of
    the result, by the clock of `Intake.now`. `beams`: one entry for each row with several beams;
    the token of such a row is ignored. `failures`: requests with a logits post-processor that
    failed, or with rows that could not run; the tokens of their rows are ignored. `stale`: some
    blocks that count as computed were not computed. `extras` is not recorded, so a replay has none.
    """

    tokens: np.ndarray
    now: float
    num_tokens: np.ndarray | None = None
    beams: tuple[BeamCandidates, ...] = ()
    failures: tuple[Failure, ...] = ()
    stale: bool = False
    extras: Extras | None = None


class Host(Protocol):
    """The interface of a host to the loop. Its methods do not raise a callback's exception."""

    def fetch(self, room: int | None, num_active: int) -> Intake:
        """Return the input of an iteration.

        `room`: the number of requests that GetInferenceRequests may return at most; None for no
        limit.
        `num_active`: the number of active requests.
        """

    def respond(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Send a response.

        If the callback fails and the response is not final, the next intake has the failure.
        """

    def prepare(self, request_id: int, processor: RequestProcessor) -> None:
        """Begin to prepare `processor`. A later intake has the id as ready, or the failure."""

    def load(self, work: AdapterWork) -> None:
        """Begin work on an adapter in another thread. A later intake has its result or failure."""

    def fail(self, failure: Failure) -> None:
        """Add a failure to the next intake."""

    def poll(self) -> None:
        """Call PollStopSignal, and add the stopped requests to the next intake."""

    def report(self, counts: Counts, phase_times: PhaseTimes) -> None:
        """Send the statistics of an iteration that ran a forward pass."""


class Step(Protocol):
    """A step in flight. The loop only reads its schedule."""

    @property
    def schedule(self) -> Schedule: ...


class Executor(Protocol):
    """Runs schedules, with torch, from a script, from a recording, or by a cost model.

    `forward` enqueues the network over the rows, `sample` chooses the tokens, `result` waits for
    the tokens. With run-ahead, `forward` of the next step precedes `result` of this one, so a
    chosen token is the input of its sequence's next row before the loop knows the token.
    """

    def forward(self, schedule: Schedule) -> Step: ...

    def sample(self, step: Any) -> None: ...

    def result(self, step: Any) -> StepResult: ...
