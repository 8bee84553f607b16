"""`JournaledHost`: records the requests and responses of a host in a journal.

A `JournaledHost` is between a loop and its host. It holds responses back until their records are
written to the journal, at the end of the iteration.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Sequence

from gptmanager.errors import (
    CapacityError,
    DuplicateRequestIdError,
    InvalidRequestError,
    JournalError,
    response_text,
)
from gptmanager.journal.accepted import AcceptedRequests, pack_response
from gptmanager.journal.entries import Sent
from gptmanager.journal.journal import Journal
from gptmanager.lifecycle.clock import system_time
from gptmanager.lifecycle.log import logger
from gptmanager.loop.active_request import ActiveRequest
from gptmanager.loop.request_table import RequestTable
from gptmanager.recorder.taps import HostTap
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.step import Failure, Host, Intake

_DUPLICATE = DuplicateRequestIdError.__name__
_FULL = "the journal cannot be written, as on a full disk (journal_on_full = 'refuse')"
_LOCK_S = 1.0  # limit on how long another thread waits for a loop that hangs in the journal

Response = tuple[int, list[NamedTensor], bool, str]


class JournaledHost(HostTap):
    """A `Host` and `JournalSeam` that passes calls to `host` and writes a journal.

    `table` is the loop's table of requests; it is set before the loop iterates. `held` has the
    responses that wait for their records in the journal. `check` raises an error if another thread
    answers the requests in place of the loop, after a hang. Then the loop writes nothing more.
    """

    def __init__(
        self,
        host: Host,
        journal: Journal,
        accepted: AcceptedRequests,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(host)
        self.table: RequestTable | None = None
        self.held: list[Response] = []
        self._journal, self._accepted, self._check = journal, accepted, check
        accepted.is_cached = self._is_cached
        self._delivered: list[int] = []  # requests that the next write records as delivered
        self._duplicates: Counter[int] = Counter()  # id -> number of refused duplicates
        self._refused: set[int] = set()  # requests refused because they could not be written
        self._is_broken = False  # a write to the journal has failed
        self._lock = threading.Lock()  # guards the journal, `_delivered` and `_duplicates`
        host_fetch, host_poll = host.fetch, host.poll
        self._respond, self._fail = host.respond, host.fail

        def fetch(room: int | None, num_active: int) -> Intake:
            intake = host_fetch(room, num_active)
            if intake.forgotten_adapters:
                accepted.forget_tasks(intake.forgotten_adapters)
            if intake.requests and not intake.resumed:
                self._accept(intake.requests)
            return intake

        def respond(
            request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
        ) -> None:
            self.held.append((request_id, tensors, is_final, error))

        def poll() -> None:
            self.flush()
            host_poll()

        self.fetch, self.respond, self.poll = fetch, respond, poll

    def _accept(self, requests: Sequence[InferenceRequest]) -> None:
        now, entries = system_time(), self._journal.entries
        packed: dict[int, bytes] = {}
        with self._lock:
            self._check()
            self._write_delivered()
            for request in requests:
                request_id = request.request_id
                if request_id in entries or request_id in packed:
                    self._duplicates[request_id] += 1
                    continue
                try:
                    packed[request_id] = self._accepted.pack(request, now)
                except OSError as error:  # the request's adapter or tokenizer cannot be stored
                    self._journal.fail(error)
                    if self._journal.refuses:
                        self._refuse(request_id, CapacityError(_FULL))
                except Exception as error:
                    text = f"the request cannot be written to the journal: {response_text(error)}"
                    self._refuse(request_id, InvalidRequestError(text))
            if packed and not self._journal.accept([*packed.items()]):
                for request_id in packed:
                    self._refuse(request_id, CapacityError(_FULL))

    def _is_cached(self, task_id: int) -> bool:
        return self.table is not None and task_id in self.table.adapters.cache

    def _refuse(self, request_id: int, error: Exception) -> None:
        self._refused.add(request_id)
        # the request is not in the journal, so its adapter and tokenizer are unused
        self._accepted.end([request_id])
        self._fail(Failure(request_id, error))

    def _write_delivered(self) -> None:
        delivered, self._delivered = self._delivered, []
        if delivered:
            self._journal.commit(None, (), delivered)

    # JournalSeam -----------------------------------------------------------------------------

    def flush(self) -> None:
        held, self.held = self.held, []
        if not held:
            return
        ends: list[tuple[int, bytes]] = []
        if not self._is_broken:
            try:
                with self._lock:
                    self._check()  # the requests may have ended in the journal, by `note_ends`
                    sent, ends = self._records(held)
                    delivered, self._delivered = self._delivered, []
                    self._journal.commit(sent, ends, delivered)
            except Exception as error:  # the loop ends; its last responses must still be sent
                self._is_broken, self.held = True, held
                if isinstance(error, JournalError):
                    raise
                text = f"responses cannot be recorded: {response_text(error)}"
                raise JournalError(text) from error
        respond, refused = self._respond, self._refused
        for response in held:
            if refused and response[0] in refused:
                self._respond_refused(response)
            else:
                respond(*response)
        if ends:
            if self._journal.keeps_responses:
                with self._lock:
                    self._delivered += [request_id for request_id, _ in ends]
            self._accepted.end([request_id for request_id, _ in ends])

    def _respond_refused(self, response: Response) -> None:
        """Send a response to a refused request if the response is final; otherwise drop it."""
        if response[2]:
            self._respond(*response)
            self._refused.discard(response[0])

    def _records(self, held: Sequence[Response]) -> tuple[Sent, list[tuple[int, bytes]]]:
        """Return the tokens and the ends that must be written before `held` is sent."""
        assert self.table is not None
        requests, entries = self.table.by_id, self._journal.entries
        sent, ends = Sent(), list[tuple[int, bytes]]()
        add_id, add_start = sent.ids.append, sent.starts.append
        add_count, add_token = sent.counts.append, sent.tokens.append
        for request_id, tensors, is_final, error in held:
            entry = entries.get(request_id)
            if is_final:
                if self._duplicates and error.startswith(_DUPLICATE):
                    self._duplicates -= Counter((request_id,))
                elif entry is not None:
                    ends.append((request_id, self._last(request_id, tensors, error)))
                continue
            request = requests.get(request_id)
            if entry is None or request is None:  # not in the journal, or it ends later in `held`
                continue
            known = entry.tokens
            start, end = request.orig_prompt_len + len(known), request.num_sent
            if request.has_extras:
                sent.add(request_id, entry, *self._with_extras(request, start, tensors))
            elif start != end - 1:
                sent.add(request_id, entry, request.tokens[start:end], [])
            else:  # `sent.add`, inlined for one token, which most responses have
                token = request.tokens[start]
                add_id(request_id)
                add_start(len(known))
                add_count(1)
                add_token(token)
                known.append(token)
                entry.num_starts = 0
        return sent, ends

    def _with_extras(
        self, request: ActiveRequest, start: int, tensors: list[NamedTensor]
    ) -> tuple[list[int], list[float]]:
        """Return a response's tokens from history position `start`, and their log probabilities.

        For beams, and for requests without `log_probs`, the log probabilities are an empty list.
        """
        assert self.table is not None
        if request.search is not None:
            ids = dict(tensors)["output_ids"]
            first = request.num_sent - ids.shape[-1]
            return ids[0, 0].tolist()[max(0, start - first) :], []
        tokens = request.tokens[start : request.num_sent]
        if not (tokens and request.output.config.log_probs):
            return tokens, []
        extras, length = self.table.extras[request.request_id], request.orig_prompt_len
        found = extras.log_probs(start - length, request.num_sent - length)[0, 0]
        return tokens, found.tolist()

    def note_ends(self, request_ids: Sequence[int], error: str) -> None:
        if not self._lock.acquire(timeout=_LOCK_S):
            logger.error("the ends of requests are not in the journal: a write to it hangs")
            return
        try:
            ids = []
            for request_id in request_ids:
                if self._duplicates[request_id] > 0:  # the end of a refused duplicate
                    self._duplicates[request_id] -= 1
                elif request_id in self._journal.entries:
                    ids.append(request_id)
            self._journal.commit(None, [(i, self._last(i, [], error)) for i in ids])
            if self._journal.keeps_responses:
                self._delivered += ids
        except Exception as failed:  # the responses must still be sent
            logger.error("the ends of requests are not in the journal: %s", response_text(failed))
        finally:
            self._lock.release()

    def _last(self, request_id: int, tensors: list[NamedTensor], error: str) -> bytes:
        """Return a final response as bytes, or b"" if the journal does not keep responses."""
        keeps = self._journal.keeps_responses
        return pack_response(request_id, tensors, error) if keeps else b""

    def close(self) -> None:
        self.held.clear()
        with self._lock:
            try:
                self._write_delivered()
            except JournalError as error:
                logger.error("the ends of requests are not in the journal: %s", error)
            self._journal.close()
