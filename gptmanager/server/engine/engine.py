"""`Engine`: runs the requests of every protocol on a manager, within the server's limits.

An engine accepts all requests of a call or none of them. Its methods must be called on the event
loop, except `encode_now`.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import os
import random
import time
from collections.abc import Iterator, Sequence

from gptmanager import GptManager, ManagerState
from gptmanager.callbacks import AsyncRequestQueue, BannedTexts, Generation
from gptmanager.callbacks.text.text_encoder import TextEncoder, TextTooLongError
from gptmanager.errors import ConfigError, GptManagerError, ManagerDeadError, quoted
from gptmanager.server.context_length import ContextLength
from gptmanager.server.engine.adapters import FIRST_OWN_TASK, Adapter, Adapters
from gptmanager.server.engine.admission import Admission
from gptmanager.server.engine.call import Call, EngineRequest
from gptmanager.server.engine.kept_calls import KeptCalls
from gptmanager.server.engine.metrics import RequestCounts, ServerMetrics, counts_of
from gptmanager.server.engine.model_card import ModelCard
from gptmanager.server.errors import ApiError, api_error
from gptmanager.server.http.body import BodyBudget, run_in_thread
from gptmanager.server.http.keys import ServerKeys
from gptmanager.server.settings import ServerSettings

_logger = logging.getLogger(__name__)
_POLL_S = 0.02  # how often `drain` checks whether all calls have ended
LONG_TEXT = 2048  # characters; encoding a longer text takes some milliseconds


class Engine:
    """Runs requests on the model of `card`, through `queue` and `manager`.

    `adapters`: the loaded adapters. `has_adapters`: whether the manager accepts adapters.
    """

    def __init__(
        self,
        card: ModelCard,
        manager: GptManager,
        queue: AsyncRequestQueue,
        settings: ServerSettings,
        metrics: ServerMetrics,
        *,
        has_adapters: bool = True,
    ) -> None:
        self.card = card
        self.manager = manager
        self.queue = queue
        self.metrics = metrics
        has_journal = settings.journal is not None
        given = card.folder, settings.adapter_dir, settings.max_adapters
        self.adapters = Adapters(*given, has_journal=has_journal)
        self.has_adapters = has_adapters
        self.keys = ServerKeys(settings)
        self.admission = Admission(queue, self.keys, settings)
        self.body_budget = BodyBudget()
        tokenizer = card.tokenizer
        self.banned_texts = None if tokenizer is None else BannedTexts(tokenizer)
        self.is_draining = False
        self.logs_prompts = settings.log_prompts
        self._settings = settings
        clamps = settings.clamp_max_tokens
        self.context_length = ContextLength(card.max_model_len, clamps=clamps)
        self._encoder = TextEncoder(
            card.tokenizer,
            card.max_model_len,
            long_text=LONG_TEXT,
            special_in_text=not settings.no_special_tokens_in_text,
        )
        self.kept = KeptCalls()
        self._seeds = random.Random(settings.manager.params.seed or None)
        self.restored = metrics.restored
        self._calls: set[Call] = set()
        # With a journal, the first id is random, so that no request has the id of a request of an
        # earlier process.
        first = 0 if not has_journal else int.from_bytes(os.urandom(5), "big") << 20
        self._request_ids = itertools.count(first + 1)

    @property
    def counts(self) -> RequestCounts:
        """The numbers of running and waiting requests."""
        return counts_of(self.queue)

    @property
    def is_live(self) -> bool:
        """Whether the manager's loop runs and makes progress."""
        health = self.manager.health()
        return health.alive and health.progressing

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts requests, as far as its limits allow them."""
        health = self.manager.health()
        return health.alive and health.accepting and not self.is_draining

    def check_alive(self) -> None:
        """Raise ManagerDeadError, with the reason, if the manager has failed."""
        if self.manager.state is ManagerState.FAILED:
            self.manager.notify()

    # Requests ---------------------------------------------------------------------------------

    def new_seed(self) -> int:
        """Return the seed of a call that names none: of its Idempotency-Key, or a new one."""
        key = self.kept.current.get()
        return self._seeds.getrandbits(64) if key is None else key.seed

    def submit(self, requests: Sequence[EngineRequest]) -> Call:
        """Queue all requests or none, and return their call.

        If the Idempotency-Key has a kept call, return it. Raises ApiError: 404 for an unknown
        adapter, 400 for a request that can never run, 422 if that call has another body, 429 if too
        many requests wait, use the API key or are kept, 503 if the server ends or has failed.
        """
        self._check_open()
        call_key = self.kept.current.get()
        found = None if call_key is None else self.kept.find(call_key)
        if found is not None:
            return found
        adapters = [
            None if it.adapter is None else self.adapters.find(it.adapter) for it in requests
        ]
        for request in requests:
            _check_task(request.by_name.get("lora_task_id", 0))
            if request.is_scoring:
                self.context_length.check_scored(len(request.tokens))
            self.context_length.check(len(request.tokens), request.max_new_tokens)
        self.admission.check_room(requests)
        ids: list[int | None] = [None] * len(requests)
        num_bytes = 0
        if call_key is not None:
            self.restored.check(call_key, len(requests))
            num_bytes = self.kept.require_room(requests)
            ids = [call_key.request_id(index) for index in range(len(requests))]
        key = self.keys.reserve(len(requests))
        generations: list[Generation] = []
        try:
            for request, adapter, own in zip(requests, adapters, ids, strict=True):
                generations.append(self._start(request, adapter, False, own))
        except Exception as error:
            for generation in generations:
                self.metrics.cancel(generation, "cancelled")
            self.keys.release(key, len(requests))
            raise api_error(error) from error

        def end(call: Call) -> None:
            self._calls.discard(call)
            self.keys.release(key, len(requests))

        call = Call(
            generations,
            [
                None
                if adapter is None
                else functools.partial(self._start, request, adapter, True, own)
                for request, adapter, own in zip(requests, adapters, ids, strict=True)
            ],
            [self._timeout_s(request) for request in requests],
            self.metrics.cancel,
            end,
            sum(len(request.tokens) for request in requests),
            is_kept=call_key is not None,
        )
        self._calls.add(call)
        if call_key is not None:
            self.kept.add(call_key, call, num_bytes)
        return call

    def _check_open(self) -> None:
        try:
            self.check_alive()
        except ManagerDeadError as error:
            raise api_error(error) from error
        if self.is_draining:
            raise ApiError(503, "the server is shutting down", code="shutting_down")

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """Count a request against the limits while its logits post-processor is prepared.

        Raises ApiError: 429 if too many requests wait or use the same API key, 503 if the server
        shuts down or has failed.
        """
        self._check_open()
        with self.admission.preparing():
            yield

    def _start(
        self,
        request: EngineRequest,
        adapter: Adapter | None,
        with_weights: bool,
        own_id: int | None = None,
    ) -> Generation:
        """Queue a request. If a restored request has the id `own_id`, join that request instead."""
        by_name = {"include_stop_in_output": True, **request.by_name}
        by_name.pop("deadline_s", None)  # `Call` ends the request at its deadline
        if adapter is not None:
            by_name["lora_task_id"] = adapter.task_id
            if with_weights:
                by_name.update(adapter.tensors)
        if own_id is not None:
            by_name["request_id"] = own_id
        by_name.setdefault("request_id", next(self._request_ids))
        given = request.tokens, request.max_new_tokens
        start = functools.partial(
            self.metrics.submit,
            by_name["request_id"],
            is_try=adapter is not None and not with_weights,
            is_scoring=request.is_scoring,
            is_ended_by_caller=request.is_ended_by_caller,
        )
        if own_id is not None:
            expect = functools.partial(self.queue.expect, *given, **by_name)
            restored = self.restored.join(own_id, lambda: start(expect), self.metrics.respond)
            if restored is not None:
                return restored
        return start(functools.partial(self.queue.submit, *given, timeout=0.0, **by_name))

    def _timeout_s(self, request: EngineRequest) -> float | None:
        """Return the seconds that are left for a request, which may be negative."""
        own, limit = request.by_name.get("deadline_s"), self._settings.request_timeout
        found = [seconds for seconds in (own, limit) if seconds is not None]
        arrival = self.metrics.request_log.arrival.get()
        passed = 0.0 if arrival is None else time.monotonic() - arrival
        return min(found) - passed if found else None

    # Text -------------------------------------------------------------------------------------

    async def encode(self, name: str, text: str, *, special: bool = True) -> list[int]:
        """Return the same as `encode_now`, but encode a long text on a worker thread."""
        encode = functools.partial(self.encode_now, name, text, special=special)
        return await run_in_thread(encode) if len(text) >= LONG_TEXT else encode()

    def encode_now(self, name: str, text: str, *, special: bool = True) -> list[int]:
        """Return the token ids of a text, which is the value of the field `name`.

        `special`: add the tokenizer's special tokens, such as the begin token. Raises ApiError
        (400).
        """
        try:
            return self._encoder.encode(name, text, special=special)
        except TextTooLongError as error:
            raise self.context_length.exceeded(name, f"However, {error}.") from error
        except GptManagerError as error:
            raise ApiError(400, str(error), param=name) from error

    # Adapters ---------------------------------------------------------------------------------

    async def load_adapter(self, name: str, path: str, *, is_trusted: bool = False) -> Adapter:
        """Read an adapter, test it with a request, and add it under `name`. Raises ApiError.

        `is_trusted`: see `Adapters.read`.
        """
        if not self.has_adapters:
            raise ApiError(501, "this server does not support adapters")
        self._check_open()
        if name in self.card.names:
            raise ApiError(400, f"{quoted(name)} is the model's name", param="lora_name")
        with self.adapters.room(name):
            return await self._load_adapter(name, path, is_trusted)

    async def _load_adapter(self, name: str, path: str, is_trusted: bool) -> Adapter:
        read = functools.partial(self.adapters.read, name, path, is_trusted=is_trusted)
        adapter = await run_in_thread(read)
        # Generating one token checks that the adapter fits the model, and caches the adapter.
        request = EngineRequest([0], 1, lora_task_id=adapter.task_id, **adapter.tensors)
        try:
            with self._start(request, None, False) as generation:
                await generation
            self.adapters.add(adapter)  # raises if the name has been taken since
        except GptManagerError as error:
            with contextlib.suppress(ManagerDeadError):
                self.manager.forget_adapter(adapter.task_id)
            raise ApiError(
                api_error(error).status, f"lora_path = {quoted(path)}: {error}", param="lora_path"
            ) from error
        except BaseException:
            self.manager.forget_adapter(adapter.task_id)
            raise
        return adapter

    async def load_given_adapters(self) -> None:
        """Load the adapters of the settings. Raises ConfigError if one cannot be loaded."""
        for name, folder in self._settings.adapters:
            try:
                await self.load_adapter(name, os.fspath(folder), is_trusted=True)
            except ApiError as error:
                raise ConfigError(f"--adapter {name}={folder}: {error.message}") from error

    def unload_adapter(self, name: str) -> None:
        """Remove an adapter; running requests keep it.

        Raises ApiError: 404 if it is not loaded, 501 if the server does not support adapters.
        """
        if not self.has_adapters:
            raise ApiError(501, "this server does not support adapters")
        self.manager.forget_adapter(self.adapters.remove(name).task_id)

    # The end ----------------------------------------------------------------------------------

    async def drain(self, timeout_s: float) -> None:
        """Refuse new requests, and wait until all accepted requests have ended.

        After `timeout_s` seconds, the remaining requests end with the finish reason TIMED_OUT.
        """
        self.is_draining = True
        if self._calls:
            text = "new requests are refused; calls that still run, for at most %g s: %d"
            _logger.info(text, timeout_s, len(self._calls))
        loop = asyncio.get_running_loop()
        give_up = loop.time() + timeout_s
        while self._calls and loop.time() < give_up:
            await asyncio.sleep(_POLL_S)
        for call in list(self._calls):
            call.time_out()


def _check_task(task_id: int) -> None:
    """Raise ApiError (400) for a task id that is reserved for the server."""
    if task_id >= FIRST_OWN_TASK:
        raise ApiError(
            400,
            f"lora_task_id = {task_id} is outside 0..{FIRST_OWN_TASK - 1}",
            param="lora_task_id",
            code="InvalidRequestError",
        )
