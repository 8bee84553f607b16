"""`Inference`: runs calls of Triton's protocol, independently of HTTP and gRPC.

It finds models by name, runs the rows of a call concurrently, and stops calls by their ids.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Protocol
from weakref import WeakKeyDictionary, ref

import numpy as np

from gptmanager.callbacks import GenerationPart
from gptmanager.errors import quoted
from gptmanager.server.engine.call import Call, EngineRequest
from gptmanager.server.engine.engine import Engine
from gptmanager.server.errors import ApiError
from gptmanager.server.settings import ServerSettings
from gptmanager.server.triton.errors import invalid
from gptmanager.server.triton.messages import MAX_ID, InferRequest, InferResponse
from gptmanager.server.triton.statistics import ModelStatistics
from gptmanager.server.triton.tensors import InputReader, Sizes, TensorSpec
from gptmanager.server.triton.text_model import TextModel
from gptmanager.server.triton.token_model import Tensors, TokenModel

VERSION = "1"  # the only version of each model


class Reply(Protocol):
    """A reply to a row of a call. A row has one reply for each sequence that it asks for; with beam
    search, one reply for all beams.

    `request` is the request that the engine runs. `take` converts a part of its output into
    responses, each of which is a dict of tensors by name. Once `is_complete` is True, the request
    can be stopped.
    """

    @property
    def request(self) -> EngineRequest: ...

    @property
    def streams(self) -> bool: ...

    @property
    def is_complete(self) -> bool: ...

    def take(self, part: GenerationPart) -> list[Tensors]: ...


class Model(Protocol):
    """A model that clients can call. `inputs` and `outputs` are its tensors by name. `reader`
    checks the inputs of a call. `needs_outputs` are the outputs that a client must request.
    """

    @property
    def name(self) -> str: ...

    @property
    def backend(self) -> str: ...

    @property
    def inputs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def outputs(self) -> Mapping[str, TensorSpec]: ...

    @property
    def reader(self) -> InputReader: ...

    @property
    def needs_outputs(self) -> Sequence[str]: ...

    async def replies(self, row: Mapping[str, Any]) -> Sequence[Reply]: ...


class Inference:
    """Runs calls of `models`. `statistics`: name of a model -> its statistics. `max_rows`: the
    maximum number of rows in a call.
    """

    # The references are weak: an instance refers to its engine, and would keep the engine alive.
    _of_engines: ClassVar[WeakKeyDictionary[Engine, ref[Inference]]] = WeakKeyDictionary()

    @classmethod
    def of(cls, engine: Engine, settings: ServerSettings) -> Inference:
        """Return the instance for `engine`. HTTP and gRPC share it, so that each can stop the
        other's calls.
        """
        known = cls._of_engines.get(engine)
        found = None if known is None else known()
        if found is None:
            found = cls(engine, settings)
            cls._of_engines[engine] = ref(found)
        return found

    def __init__(self, engine: Engine, settings: ServerSettings) -> None:
        self.max_rows = settings.concurrency
        cache = settings.params.kv_cache_config
        has_snapshots = not engine.card.keeps_state or cache.state_snapshots != 0
        self.reuses_blocks = cache.enable_block_reuse is not False and has_snapshots
        sizes = sizes_of(engine, settings)
        tokens = TokenModel(engine, settings, sizes)
        self.models: dict[str, Model] = {tokens.name: tokens}
        if engine.card.tokenizer is not None:
            for name in ("ensemble", "tensorrt_llm_bls"):
                self.models[name] = TextModel(name, engine, settings, tokens, sizes)
        self.statistics = {name: ModelStatistics(name, VERSION) for name in self.models}
        self._engine = engine
        self._running: dict[str, set[_Running]] = defaultdict(set)  # by the ids that clients chose

    @property
    def is_live(self) -> bool:
        return self._engine.is_live

    @property
    def is_ready(self) -> bool:
        return self._engine.is_ready

    def find(self, name: str, version: str = "") -> Model:
        """Return the model of this name. Raises ApiError (404) for an unknown name or version."""
        if name not in self.models or version not in ("", VERSION):
            unknown = f" version {quoted(version)}" if name in self.models else ""
            raise ApiError(
                404,
                f"Request for unknown model: {quoted(name)}{unknown} is not found; "
                f"this server has {', '.join(self.models)}, version {VERSION}",
                param="model_name",
                code="model_not_found",
            )
        return self.models[name]

    async def one_response(self, request: InferRequest) -> InferResponse:
        """Return the only response to a call. Raises the error of a failed row."""
        async with contextlib.aclosing(self.responses(request)) as responses:
            async for response in responses:
                if response.error is not None:
                    raise response.error
                return response
        raise AssertionError("every call has a response")

    async def responses(self, request: InferRequest) -> AsyncGenerator[InferResponse, None]:
        """Yield all responses as they become ready; closing the iterator cancels the call.

        If a row fails, its error is yielded, and the other rows continue. Raises ApiError for an
        invalid call.
        """
        model = self.find(request.model_name, request.model_version)
        with self.statistics[model.name].call() as record:
            _check_id(request.id)
            rows = model.reader.rows(request.inputs)
            _check_outputs(request, model)
            record.num_rows, has_failed = len(rows), False
            if any(row.get("stop") for row in rows):
                self._stop(request.id)
                record.succeeded = True
                yield InferResponse(request, {}, True)
                return
            with self._registered(request.id) as running:
                replies = await self._replies(request, model, rows)
                requests = [_with_parameters(it.request, request.parameters) for _, it in replies]
                async with self._engine.submit(requests) as call:
                    request.call = call
                    running.begin(call)
                    async with contextlib.aclosing(_outputs(call, replies)) as found:
                        async for outputs, is_final in found:
                            if isinstance(outputs, ApiError):
                                has_failed = True
                                yield InferResponse(request, {}, is_final, outputs)
                                continue
                            record.succeeded = is_final and not has_failed
                            yield InferResponse(request, _chosen(outputs, request), is_final)

    def _stop(self, request_id: str) -> None:
        """Stop all calls with this id, if any still run. Raises ApiError (400) for an empty id."""
        if not request_id:
            raise invalid("id", "Cannot send stop request without specifying a request_id")
        for running in self._running.get(request_id, ()):
            running.stop()

    @contextlib.contextmanager
    def _registered(self, request_id: str) -> Iterator[_Running]:
        running = _Running()
        if not request_id:
            yield running
            return
        self._running[request_id].add(running)
        try:
            yield running
        finally:
            self._running[request_id].discard(running)
            if not self._running[request_id]:
                del self._running[request_id]

    async def _replies(
        self, request: InferRequest, model: Model, rows: Sequence[Mapping[str, Any]]
    ) -> list[tuple[int, Reply]]:
        """Return the replies of all rows, each with the index of its row.

        Raises ApiError for an invalid row, and as soon as there are too many replies.
        """
        found: list[tuple[int, Reply]] = []
        for index, row in enumerate(rows):
            found += [(index, reply) for reply in await model.replies(row)]
            self._engine.admission.check_number(len(found))
            _check_single_response(request, [reply for _, reply in found])
        return found


def sizes_of(engine: Engine, settings: ServerSettings) -> Sizes:
    """Return the size limits for the inputs of a call."""
    card = engine.card
    highest = settings.manager.params.peft_cache_manager_config.max_adapter_size
    return Sizes(
        rows=settings.concurrency,
        prompt=card.max_model_len - 1,
        vocabulary=card.vocab_size,
        hidden=card.hidden_size,
        adapter_rows=card.adapter_rows,
        adapter_width=card.adapter_width * highest,
    )


class _Running:
    """A call that can be stopped, even before its requests have been submitted to the engine."""

    def __init__(self) -> None:
        self._call: Call | None = None
        self._is_stopped = False

    def begin(self, call: Call) -> None:
        self._call = call
        if self._is_stopped:
            call.cancel()

    def stop(self) -> None:
        self._is_stopped = True
        if self._call is not None:
            self._call.cancel()


async def _outputs(
    call: Call, replies: Sequence[tuple[int, Reply]]
) -> AsyncGenerator[tuple[Tensors | ApiError, bool], None]:
    """Yield pairs: the tensors of a response or the error of a row, and whether this response is
    the last of the call.
    """
    num_left = len(replies)
    rows = [np.array([[row]], dtype=np.int32) for row, _ in replies]
    async for index, part in call.outcomes():
        reply = replies[index][1]
        try:
            if isinstance(part, ApiError):
                raise part
            found = reply.take(part)
        except ApiError as error:
            num_left -= 1
            yield error, num_left == 0
            continue
        if part.result is not None:
            num_left -= 1
        elif reply.is_complete:
            call.stop(index)
        for position, tensors in enumerate(found):
            tensors["batch_index"] = rows[index]
            yield tensors, num_left == 0 and position == len(found) - 1


def _check_id(request_id: str) -> None:
    if len(request_id) > MAX_ID:
        raise invalid("id", f"id has {len(request_id)} characters, at most {MAX_ID} are allowed")


def check_outputs(number: int, model: Model) -> None:
    """Raise ApiError if a call requests more outputs than the model has."""
    if number > len(model.outputs):
        raise invalid(
            "outputs",
            f"{number} outputs are requested; model {quoted(model.name)} has {len(model.outputs)}",
        )


def _check_outputs(request: InferRequest, model: Model) -> None:
    for name in request.outputs or ():
        if name not in model.outputs:
            raise invalid(
                name, f"unexpected inference output {quoted(name)} for model {quoted(model.name)}"
            )
    for name in model.needs_outputs:
        if request.outputs is not None and name not in request.outputs:
            raise invalid(name, f"{name} is missing among the outputs of the request: add it")


def _check_single_response(request: InferRequest, replies: Sequence[Reply]) -> None:
    """Check that a client that accepts one response will not get several."""
    if request.may_have_many:
        return
    if len(replies) > 1:
        reason = f"the rows and sequences of this call have {len(replies)} responses"
    elif replies[0].streams:
        reason = "a stream has a response for each token"
    else:
        return
    raise invalid(
        None,
        f"{reason}, but this method returns only one: use ModelStreamInfer over gRPC or "
        "generate_stream over HTTP",
    )


def _with_parameters(request: EngineRequest, parameters: Mapping[str, Any]) -> EngineRequest:
    """Apply the parameters of a call to one of its requests.

    `timeout` is in microseconds. The highest `priority` is 1. For both parameters, 0 means the
    default.
    """
    for name in ("priority", "timeout"):
        value = parameters.get(name, 0)
        if type(value) is not int or value < 0:
            raise invalid(
                name, f"the parameter {name} = {quoted(value)} must be an integer of at least 0"
            )
        if value and name == "timeout":
            request.by_name["deadline_s"] = value / 1e6
        elif value:
            request.by_name["priority"] = 1 / value
    return request


def _chosen(outputs: Tensors, request: InferRequest) -> Tensors:
    if request.outputs is None:
        return outputs
    return {name: outputs[name] for name in request.outputs}
