"""`RestoredResponses`: holds responses to restored requests until a client joins."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from gptmanager import NamedTensor
from gptmanager.callbacks import Generation
from gptmanager.callbacks.queue.result import error_of
from gptmanager.config import Delivered, FinishReason
from gptmanager.lifecycle.clock import monotonic
from gptmanager.server.errors import api_error
from gptmanager.server.http.idempotency import CallKey, is_keyed, reused

MAX_BYTES = 64 << 20
KEEP_S = 600.0

Deliver = Callable[[int, list[NamedTensor], bool, str], None]


@dataclass(slots=True)
class _Restored:
    responses: list[tuple[list[NamedTensor], bool, str]] = field(default_factory=list)
    num_bytes: int = 0


class RestoredResponses:
    """Holds the responses to restored requests that have an Idempotency-Key. Thread-safe.

    A request that fails with a transient error or times out is dropped at once, as in `KeptCalls`;
    any other ended request is dropped KEEP_S seconds after its end. If all held responses exceed
    MAX_BYTES, ended requests are dropped earlier, the request that ended first before the others.
    Requests are dropped only when `hold`, `check` or `join` is called.
    """

    def __init__(self) -> None:
        self._held: dict[int, _Restored] = {}
        self._ended: deque[tuple[float, int]] = deque()  # (time of the end, request id)
        self._num_bytes = 0
        self._lock = threading.RLock()

    def restore(self, request_id: int) -> Delivered | None:
        """Begin to hold the responses to a request with a key. This is the manager's `restore_cb`.

        The result states that nothing has been delivered yet. It is None if the request has no key.
        """
        if not is_keyed(request_id):
            return None  # no client can join: the manager decides by the journal alone
        self._held[request_id] = _Restored()
        return Delivered(0, False)

    def hold(self, request_id: int, tensors: list[NamedTensor], is_final: bool, error: str) -> bool:
        """Hold a response if no client has joined its restored request, otherwise return False."""
        with self._lock:  # also if nothing is held: a response must not overtake those of a join
            held = self._held.get(request_id)
            if held is not None and is_final and _may_succeed_later(tensors, error):
                self._remove(request_id)  # the call runs again if its client repeats it
            elif held is not None:
                held.responses.append((tensors, is_final, error))
                size = 256 + sum(tensor.nbytes for _, tensor in tensors)
                held.num_bytes += size
                self._num_bytes += size
                if is_final:
                    self._ended.append((monotonic(), request_id))
            self._drop_ended()
        return held is not None

    def _drop_ended(self) -> None:
        oldest = monotonic() - KEEP_S
        while self._ended and (self._num_bytes > MAX_BYTES or self._ended[0][0] < oldest):
            _, request_id = self._ended.popleft()
            self._remove(request_id)

    def _remove(self, request_id: int) -> _Restored:
        held = self._held.pop(request_id, None) or _Restored()
        self._num_bytes -= held.num_bytes
        return held

    def check(self, key: CallKey, num_requests: int) -> None:
        """Raise ApiError (422) if a restored request has this key but another body."""
        own = {key.request_id(index) for index in range(num_requests)}
        with self._lock:
            self._drop_ended()
            if any(key.has_name_of(it) and it not in own for it in self._held):
                raise reused()

    def join(
        self, request_id: int, expect: Callable[[], Generation], deliver: Deliver
    ) -> Generation | None:
        """Return the handle that `expect` makes, and deliver the held responses of the request.

        Returns None if no restored request has this id, or if the request was joined or dropped.
        """
        with self._lock:  # no response can arrive between `expect` and `deliver`
            self._drop_ended()
            if request_id not in self._held:
                return None
            generation = expect()
            for response in self._remove(request_id).responses:
                deliver(request_id, *response)
            return generation


def _may_succeed_later(tensors: Iterable[NamedTensor], error: str) -> bool:
    """Return whether this final response is a transient error, or of a request that timed out."""
    if error:
        return api_error(error_of(error)).is_transient
    reasons = (tensor.tolist()[0] for name, tensor in tensors if name == "finish_reasons")
    return any(FinishReason.TIMED_OUT in found for found in reasons)
