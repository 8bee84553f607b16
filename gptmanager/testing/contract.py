"""`ContractChecker` checks that a manager and a host keep the contract between them."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gptmanager.arguments import flag, function, number
from gptmanager.errors import response_text
from gptmanager.lifecycle.callables import UnfinishedAnswer, check_answer, passed_on
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.request.inference_request import (
    GetInferenceRequestsCallback,
    InferenceRequest,
    NamedTensor,
    PollStopSignalCallback,
    SendResponseCallback,
)

_NO_MORE = object()
_ATTRIBUTES = ("is_streaming", "priority", "deadline_s", "queue_timeout_s", "cache_salt")


class ContractViolation(AssertionError):
    """Raised when a manager or a host has broken the contract between them."""


@dataclass(frozen=True, slots=True)
class _Taken:
    """A request that Get has returned, with a copy of its original values."""

    request: InferenceRequest
    attributes: tuple[Any, ...]
    tensors: dict[str, Any]

    def change(self) -> str:
        """Return the name of an attribute or tensor that has changed, or "" if there is none.

        If tensors were added or removed, return all of their names.
        """
        request = self.request
        for name, value in zip(_ATTRIBUTES, self.attributes, strict=True):
            if getattr(request, name) != value:
                return name
        if request.tensors.keys() != self.tensors.keys():
            return ", ".join(sorted(request.tensors.keys() ^ self.tensors.keys()))
        changed = (n for n, v in self.tensors.items() if not _equal(v, request.tensors[n]))
        return next(changed, "")


class ContractChecker:
    """Wraps a host's callbacks and checks that the manager and the host keep their contract.

    Get is the callback GetInferenceRequests, and Poll the callback PollStopSignal.

    The manager must send exactly one final response for every request that Get returns, and nothing
    after it. Each response must have the required tensors. The offsets of streamed responses must
    be contiguous, and top log probabilities must have the right shapes. A prompt's log
    probabilities must be sent once.

    The host's Get must return an iterable of InferenceRequests, each once, with ids that are not in
    use (`tolerates_duplicates` permits ids in use, which a manager answers with an error). The host
    must not change these requests afterwards. Poll must return request ids. Get and Poll must not
    raise. SendResponse must not raise for a final response. No callback may return a coroutine,
    because it would never be awaited. No callback may take longer than `callback_budget_s`, because
    callbacks block the loop.

    `check` raises ContractViolation with a sentence for each violation and each missing response.
    `notes` lists calls of Get that returned more requests than were asked for, which is allowed,
    but may be unintended.
    """

    def __init__(
        self,
        get_inference_requests: GetInferenceRequestsCallback,
        send_response: SendResponseCallback,
        poll_stop_signal: PollStopSignalCallback | None = None,
        *,
        tolerates_duplicates: bool = False,
        callback_budget_s: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._get = function("get_inference_requests", get_inference_requests)
        self._send = function("send_response", send_response)
        if poll_stop_signal is not None:
            function("poll_stop_signal", poll_stop_signal)
        self._poll = poll_stop_signal
        self._tolerates_duplicates = flag("tolerates_duplicates", tolerates_duplicates)
        self._budget_s = number(0, "callback_budget_s", callback_budget_s)
        self._clock = function("clock", clock)
        self._live: dict[int, _Taken] = {}
        self._offsets: dict[int, int] = {}
        self._prompts_sent: set[int] = set()  # requests that have their prompt log probabilities
        self._duplicates: Counter[int] = Counter()
        self._ended: set[int] = set()
        self._complaints = Counter[str]()  # a complaint about the host -> number of times
        self.violations: list[str] = []
        self.notes: list[str] = []

    # The host's callbacks -------------------------------------------------------------------

    def get_inference_requests(self, max_num_requests: int) -> Iterable[InferenceRequest]:
        """Call the host's Get, and return its requests, one by one if they are not in a list.

        Requests that Get has yielded before it raises an exception are accepted.
        """
        answer = self._called("Get", self._get, max_num_requests)
        return passed_on(answer, self._requests_of(answer, max_num_requests))

    def _requests_of(self, answer: Any, max_num_requests: int) -> Iterator[InferenceRequest]:
        count = 0
        try:
            items = iter(answer)
        except TypeError:
            self._complain(f"Get returned {answer!r}, expected an iterable of InferenceRequests")
            raise
        while True:
            request = self._called("Get", next, items, _NO_MORE)
            if request is _NO_MORE:
                break
            count += 1
            if isinstance(request, InferenceRequest):
                self._take(request)
            else:
                self._complain(f"Get returned {request!r}, expected an InferenceRequest")
            yield request
        if 0 <= max_num_requests < count:
            self.notes.append(f"Get returned {count} requests when asked for at most "
                              f"{max_num_requests}: all are accepted")  # fmt: skip

    def send_response(
        self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str
    ) -> None:
        """Check a response, and pass it to the host's SendResponse."""
        self._inspect(request_id, dict(tensors), is_final, error)
        begin = self._clock()
        try:
            self._finished("SendResponse", self._send(request_id, tensors, is_final, error))
        except Exception as raised:
            if is_final and not isinstance(raised, UnfinishedAnswer):
                self._complain(
                    f"SendResponse raised {response_text(raised)} for the final response to "
                    f"request {request_id}, which is lost"
                )
            raise
        finally:
            self._watch("SendResponse", begin)

    def poll_stop_signal(self) -> Iterable[int]:
        """Call the host's Poll, if there is one; otherwise no request is stopped."""
        if self._poll is None:
            return set()
        answer: Iterable[int] = self._called("Poll", self._poll)
        try:
            items = iter(answer)
        except TypeError:
            self._complain(f"Poll returned {answer!r}, expected a set of request ids")
            return answer
        return passed_on(answer, self._inspected_ids(items))

    def check(self, manager: GptManager | None = None) -> None:
        """Raise ContractViolation with all violations, if there are any.

        Call this method when the manager is idle or has ended. If `manager` is passed, its KV cache
        blocks and adapter pages are audited, too.
        """
        violations = [f"{text} ({times} times)" if times > 1 else text
                      for text, times in self._complaints.items()]  # fmt: skip
        violations += self.violations
        violations += [f"request {i} has no final response" for i in self._live]
        violations += [f"the second request {i} has no final response" for i in +self._duplicates]
        if manager is not None:
            report = manager.audit()
            violations += report.problems
            for block, owners in report.owners.items():
                if not self._live.keys() & owners:
                    violations.append(f"block {block} leaked: it is held by requests {[*owners]}")
        if violations:
            raise ContractViolation("; ".join(violations))

    def _inspected_ids(self, items: Iterator[int]) -> Iterator[int]:
        """Yield the ids that Poll returned, including those yielded before an exception."""
        while (item := self._called("Poll", next, items, _NO_MORE)) is not _NO_MORE:
            if isinstance(item, bool) or not isinstance(item, int):
                self._complain(f"Poll returned {item!r}, expected a request id")
            yield item

    def _called(self, name: str, callback: Callable[..., Any], *arguments: Any) -> Any:
        begin = self._clock()
        try:
            return self._finished(name, callback(*arguments))
        except UnfinishedAnswer:
            raise
        except Exception as error:
            self._complain(f"{name} raised {response_text(error)}")
            raise
        finally:
            self._watch(name, begin)

    def _finished(self, name: str, answer: Any) -> Any:
        """Return the answer. Raise UnfinishedAnswer if a manager would refuse it as unfinished."""
        try:
            check_answer(name, answer, may_yield=name != "SendResponse")
        except UnfinishedAnswer as error:
            self._complain(str(error))
            raise
        return answer

    def _watch(self, name: str, begin: float) -> None:
        taken = self._clock() - begin
        if taken > self._budget_s:
            self._complain(f"{name} took longer than {self._budget_s:g} s: it blocks the loop")

    def _complain(self, text: str) -> None:
        self._complaints[text] += 1

    # The manager's side ---------------------------------------------------------------------

    def _take(self, request: InferenceRequest) -> None:
        request_id = request.request_id
        if request_id in self._live:
            if self._live[request_id].request is request:
                self._complain(f"Get returned request {request_id} twice")
            elif not self._tolerates_duplicates:
                self._complain(
                    f"Get returned a request {request_id} while another with that id runs"
                )
            self._duplicates[request_id] += 1
            return
        attributes = tuple(getattr(request, name) for name in _ATTRIBUTES)
        tensors = {name: _copied(value) for name, value in request.tensors.items()}
        self._live[request_id] = _Taken(request, attributes, tensors)
        self._offsets[request_id] = 0
        self._ended.discard(request_id)

    def _inspect(
        self, request_id: int, tensors: dict[str, Tensor], is_final: bool, error: str
    ) -> None:
        if self._duplicates[request_id] and error.startswith("DuplicateRequestIdError"):
            self._duplicates[request_id] -= 1
            return
        taken = self._live.get(request_id)
        complain = self.violations.append
        if taken is None:
            if request_id not in self._ended:
                complain(f"a response to request {request_id}, which Get has not returned")
            elif is_final:
                complain(f"a second final response to request {request_id}")
            else:
                complain(f"a response to request {request_id} after its final response")
            return
        if error and (tensors or not is_final):
            complain(f"the error response to request {request_id} has tensors or is not final")
        if not error:
            self._inspect_tensors(taken.request, tensors, is_final)
        if is_final:
            if change := taken.change():
                self._complain(
                    f"request {request_id} was changed after Get had returned it: {change}"
                )
            del self._live[request_id], self._offsets[request_id]
            self._prompts_sent.discard(request_id)
            self._ended.add(request_id)

    def _inspect_tensors(
        self, request: InferenceRequest, tensors: dict[str, Tensor], is_final: bool
    ) -> None:
        name = f"request {request.request_id}"
        complain = self.violations.append
        needed = {"output_ids", "sequence_length"}
        needed |= {"output_offset"} if request.is_streaming else set()
        needed |= {"finish_reasons", "request_metrics"} if is_final else set()
        if not needed <= tensors.keys():
            complain(f"{name}: a response lacks {sorted(needed - tensors.keys())}")
            return
        output_ids, lengths = tensors["output_ids"], tensors["sequence_length"]
        if output_ids.dtype != torch.int32 or output_ids.dim() != 3:
            complain(f"{name}: output_ids is {output_ids.dtype} {list(output_ids.shape)}")
        elif int(lengths.max()) > output_ids.shape[2]:
            complain(f"{name}: sequence_length exceeds output_ids {list(output_ids.shape)}")
        for text in _wrong_log_probs(request, tensors, int(lengths.max())):
            complain(f"{name}: {text}")
        self._inspect_prompt(request, tensors)
        if not request.is_streaming:
            if not is_final:
                complain(f"{name} does not stream, yet got a response before its final response")
            return
        offset, expected = int(tensors["output_offset"]), self._offsets[request.request_id]
        if offset != expected:
            complain(f"{name}: output_offset {offset}, expected {expected}")
        self._offsets[request.request_id] = offset + int(lengths.max())
        if not is_final and not int(lengths.max()):
            complain(f"{name}: a response without tokens that is not final")

    def _inspect_prompt(self, request: InferenceRequest, tensors: dict[str, Tensor]) -> None:
        """Check that a prompt's log probabilities are in the first response, and only there."""
        was_sent = request.request_id in self._prompts_sent
        if _number(request, "num_prompt_log_probs", -1) < 0:
            expected = 0
        else:
            expected = 0 if was_sent else 1
            self._prompts_sent.add(request.request_id)
        if ("prompt_log_probs" in tensors) != expected:
            text = "lacks" if expected else "has unexpected"
            self.violations.append(
                f"request {request.request_id}: a response {text} prompt_log_probs"
            )


def _number(request: InferenceRequest, name: str, default: int) -> int:
    """Return the value of a tensor that a manager has accepted."""
    value = request.tensors.get(name)
    return default if value is None else int(torch.as_tensor(value).reshape(-1)[0])


def _wrong_log_probs(
    request: InferenceRequest, tensors: dict[str, Tensor], length: int
) -> Iterator[str]:
    """Yield what is wrong with the top log probabilities of a response that has `length` tokens.

    If there are several beams, `length` is the length of the longest beam.
    """
    count = _number(request, "num_top_log_probs", 0)
    rows = tensors["sequence_length"].shape[1]
    for name, dtype in (("top_log_probs", torch.float32), ("top_log_prob_ids", torch.int32)):
        found = tensors.get(name)
        if not count or found is None:
            if count or found is not None:
                yield f"a response lacks {name}" if count else f"{name} was not asked for"
            continue
        fits = found.dtype == dtype and found.dim() == 4 and found.shape[:2] == (1, rows)
        if not fits or found.shape[3] > count:
            yield f"{name} is {found.dtype} {list(found.shape)}"
        elif request.is_streaming and found.shape[2] != length:
            yield f"{name} has {found.shape[2]} positions, but the response has {length} tokens"


def _copied(value: Any) -> Any:
    """Return a copy of `value` for comparisons. For a tensor or array: dtype, shape and bytes.

    For a tensor on the meta device, which has no bytes, the copy has None instead of them.
    """
    if isinstance(value, Tensor):
        if value.layout is not torch.strided:
            return value  # managers refuse sparse and other unusual layouts
        held = value.detach()[_once_each(value.shape, value.stride())]
        if held.is_meta:
            return str(value.dtype), value.shape, None
        held = held.cpu().clone(memory_format=torch.contiguous_format).flatten()
        return str(value.dtype), value.shape, held.view(torch.uint8).numpy().tobytes()
    if isinstance(value, np.ndarray):
        shown = np.asarray(value)[_once_each(value.shape, value.strides)]
        return str(value.dtype), value.shape, shown.tobytes()
    return value


def _once_each(shape: Sequence[int], strides: Sequence[int]) -> tuple[slice, ...]:
    """Return an index that selects each repeated element of an expanded tensor only once.

    An expanded tensor may repeat an element so often that a full copy would not fit into memory.
    """
    sizes = zip(shape, strides, strict=True)
    return tuple(slice(0, 1) if size and not stride else slice(None) for size, stride in sizes)


def _equal(copy: Any, value: Any) -> bool:
    return copy is value or bool(copy == _copied(value))
