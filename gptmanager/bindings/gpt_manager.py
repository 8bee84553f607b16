"""`GptManager` with the arguments of `tensorrt_llm.bindings`, in their older or newer order."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import gptmanager
from gptmanager import InferenceRequest, ModelType
from gptmanager.bindings.memory_counters import LastRecord, MemoryCounters
from gptmanager.bindings.requests import NamedTensor, as_id
from gptmanager.bindings.trt_gpt_model import (
    TrtGptModelOptionalParams,
    TrtGptModelType,
    translated,
    with_policy,
)
from gptmanager.errors import ConfigError
from gptmanager.lifecycle.callables import check_answer, ordinary, passed_on

_BEGIN = ("trt_engine_path", "model_type")
_CALLBACKS = (
    *("get_inference_requests_cb", "send_response_cb"),
    *("poll_stop_signal_cb", "return_batch_manager_stats_cb"),
)
_END = ("optional_params", "terminate_req_id", "max_draft_tokens", "exclude_input_in_output")
_OLDER = (*_BEGIN, "max_beam_width", "scheduler_policy", *_CALLBACKS, *_END)  # 0.9 to 0.11
_NEWER = (*_BEGIN, *_CALLBACKS, *_END)  # from 0.12 on


class GptManager:
    """`GptManager(trt_engine_path, model_type, [max_beam_width, scheduler_policy,]
    get_inference_requests_cb, send_response_cb, poll_stop_signal_cb, return_batch_manager_stats_cb,
    optional_params, terminate_req_id, max_draft_tokens, exclude_input_in_output)`

    Pass arguments by position or by name. `trt_engine_path` is a Hugging Face folder, or anything
    else that `gptmanager.GptManager` accepts as its model. A request with the id
    `terminate_req_id` does not run. Once `get_inference_requests_cb` has returned this request, the
    callback is not called again, and the manager ends when all other requests have ended.

    Raise TypeError for a wrong number or name of arguments, ConfigError for an invalid value.
    """

    def __init__(self, *args: Any, **keywords: Any) -> None:
        given = _by_name(args, keywords)
        get, send, poll, stats = (given.get(name) for name in _CALLBACKS)
        if given.get("max_draft_tokens"):
            raise ConfigError(
                f"max_draft_tokens = {given['max_draft_tokens']} has no effect: leave it out; a "
                "request's draft tokens are limited by its max_new_tokens and by max_input_len"
            )
        params = given.get("optional_params")
        params = TrtGptModelOptionalParams() if params is None else params
        max_beam_width, scheduler, params = translated(params)
        if given.get("max_beam_width") is not None:
            max_beam_width = given["max_beam_width"]
        if given.get("scheduler_policy") is not None:
            scheduler = with_policy(scheduler, given["scheduler_policy"])
        if given.get("exclude_input_in_output"):
            params.exclude_input_in_output = True
        terminate_id = given.get("terminate_req_id")
        ending = _Ending(None if terminate_id is None else as_id(terminate_id))
        self._last_record = LastRecord()
        self._manager = gptmanager.GptManager(
            given["trt_engine_path"],
            _model_type(given["model_type"]),
            max_beam_width,
            scheduler,
            get and ending.fetching(ordinary("get_inference_requests_cb", get, may_yield=True)),
            send and _sending(ordinary("send_response_cb", send)),
            poll,
            self._reporting(stats and ordinary("return_batch_manager_stats_cb", stats)),
            params,
        )
        MemoryCounters.begin(self._last_record)
        ending.manager = weakref.ref(self._manager)
        if ending.has_begun:  # the id was fetched too early to end the manager: fetch again
            self._manager.notify()

    def __enter__(self) -> GptManager:
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def shutdown(self, *_: object) -> None:
        """Fetch no more requests, run accepted requests to their end, and return. Idempotent."""
        self._manager.shutdown()
        MemoryCounters.end(self._last_record)

    def wait_until_terminate(self) -> None:
        """Wait until the manager ends by `terminate_req_id` or by `shutdown` in another thread."""
        self._manager.wait()
        MemoryCounters.end(self._last_record)

    @property
    def manager(self) -> gptmanager.GptManager:
        """The wrapped `gptmanager.GptManager`, with `audit()`, `health()`, `notify()` and so on."""
        return self._manager

    def _reporting(self, stats: Callable[[str], Any] | None) -> Callable[[str], Any]:
        last = self._last_record

        def report(record: str) -> Any:
            last.record = record
            return None if stats is None else stats(record)

        return report


@dataclass
class _Ending:
    """Ends the manager when the request with the id `terminate_id` is fetched.

    Holds only a weak reference to the manager.
    """

    terminate_id: int | None
    has_begun: bool = False
    manager: Callable[[], gptmanager.GptManager | None] = lambda: None

    def fetching(
        self, get: Callable[[int], Iterable[InferenceRequest]]
    ) -> Callable[[int], Iterable[InferenceRequest]]:
        """Return a Get callback that calls `get`, and ends the manager at the id `terminate_id`."""

        def fetch(max_num_requests: int) -> Iterable[InferenceRequest]:
            requests = () if self.has_begun else get(max_num_requests)
            check_answer("GetInferenceRequests", requests, may_yield=True)
            if self.terminate_id is None:
                return requests
            return passed_on(requests, self._until_end(requests))

        return fetch

    def _until_end(self, requests: Iterable[InferenceRequest]) -> Iterator[InferenceRequest]:
        try:
            for request in requests:  # one by one: Get may yield requests and then raise
                if getattr(request, "request_id", None) == self.terminate_id:
                    self.has_begun = True
                else:
                    yield request
        finally:
            manager = self.manager()
            if self.has_begun and manager is not None:
                manager.shutdown()  # from a callback this returns at once


def _sending(send: Callable[..., Any]) -> Callable[..., Any]:
    def respond(request_id: int, tensors: Any, is_final: bool, error: str) -> Any:
        named = [NamedTensor(it.tensor, it.name) for it in tensors]
        return send(request_id, named, is_final, error)

    return respond


def _by_name(args: tuple[Any, ...], keywords: dict[str, Any]) -> dict[str, Any]:
    """Return all arguments by name. Raise TypeError for a wrong number or name of arguments.

    Positional arguments are in the newer order if the third argument is a callback.
    """
    names = _NEWER if len(args) > 2 and callable(args[2]) else _OLDER
    if len(args) > len(names):
        raise TypeError(f"GptManager() takes at most {len(names)} arguments, got {len(args)}")
    given = dict(zip(names, args, strict=False))
    for name, value in keywords.items():
        if name not in _OLDER:
            raise TypeError(f"GptManager() has no argument {name!r}")
        if name in given:
            raise TypeError(f"GptManager() got {name!r} twice")
        given[name] = value
    missing = [name for name in _BEGIN if name not in given]
    if missing:
        raise TypeError(f"GptManager() needs {', '.join(missing)}")
    return given


def _model_type(model_type: Any) -> Any:
    return ModelType(model_type) if isinstance(model_type, TrtGptModelType) else model_type
