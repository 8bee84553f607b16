"""Converts accepted requests to bytes and back.

Adapters and tokenizers, which several requests share, are stored once, as objects of the journal
folder. A post-processor is stored as its name. A grammar without banned words is stored as data.
"""

from __future__ import annotations

import copy
import struct
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import orjson
import torch
from tokenizers import Tokenizer

from gptmanager.decoding.guided.grammar_masks import Grammar
from gptmanager.decoding.guided.grammar_matcher import GrammarSource
from gptmanager.decoding.guided.grammar_start import GrammarStart
from gptmanager.decoding.guided.guided import GuidedDecoding, grammar_of
from gptmanager.decoding.sampling.random_numbers import derive_seed
from gptmanager.errors import InvalidRequestError, JournalError
from gptmanager.host.rank_messages import pack_requests, unpack_requests
from gptmanager.journal.records import MAX_RECORD_BYTES
from gptmanager.journal.segments import JournalFolder
from gptmanager.request.inference_request import InferenceRequest, NamedTensor
from gptmanager.request.read_tensors import read_int

_LENGTH = struct.Struct("<I")
_ADAPTER = ("lora_weights", "lora_config")
_NO_WEIGHTS = torch.empty(0)
_MOST_TASKS = 1024  # adapters that later requests may name by their task id alone
_MOST_TENSOR_BYTES = 16 << 20  # bytes of a tensor in a stored response


_IsSame = Callable[[Mapping[str, Any]], bool]


class Accepted(NamedTuple):
    """A request as it was accepted, at the wall-clock time `time`.

    `objects` maps the kinds of its objects ("adapter", "tokenizer") to their digests. `grammar` is
    its grammar as data, or None. For `num_forgets` see `_Task`.
    """

    request: InferenceRequest
    time: float
    objects: Mapping[str, str]
    grammar: Mapping[str, Any] | None
    num_forgets: int


class _Task(NamedTuple):
    """The adapter of a task id.

    `digest` names its stored tensors. `num_forgets` is the number of adapters that managers had
    forgotten before the task id got this adapter.
    """

    digest: str
    num_forgets: int


class _Used(NamedTuple):
    """The objects that an unfinished request uses, and the adapter of its task id."""

    digests: list[str]
    task_id: int | None
    task: _Task | None


class AcceptedRequests:
    """Converts requests to bytes and back, and stores their objects in `folder`.

    `seed` is the manager's seed, from which requests without a seed derive theirs. `is_cached`
    returns whether the manager has an adapter under a task id.
    """

    def __init__(self, folder: JournalFolder, seed: int, *, syncs: bool) -> None:
        self._folder, self._seed, self._syncs = folder, seed, syncs
        self.is_cached: Callable[[int], bool] = lambda task_id: False
        self._tasks: OrderedDict[int, _Task] = OrderedDict()  # by task id
        self._given: dict[int, _IsSame] = {}  # task id -> test for tensors equal to the stored ones
        self._num_forgets = 0  # adapters that managers of this journal forgot, as far as known
        self._guides: dict[str, GuidedDecoding] = {}  # by the digest of their tokenizer
        self._guide_digests: dict[int, tuple[Any, str]] = {}  # by the identity of the guide
        self._used: dict[int, _Used] = {}  # by request id

    def pack(self, request: InferenceRequest, now: float) -> bytes:
        """Return a request as bytes, and store its objects.

        `now` is the wall-clock time of its acceptance. Raise JournalError for a request that is too
        large, and OSError if an object cannot be written.
        """
        bare, objects = copy.copy(request), {}
        task_id, task = self._adapter_of(bare)
        if task is not None:
            objects["adapter"] = task.digest
        seed = derive_seed(self._seed, request.request_id)
        bare.tensors.setdefault("random_seed", np.array([seed], dtype=np.uint64))
        grammar = None
        processor = request.logits_post_processor
        if type(processor) is Grammar and processor.bans is None:
            objects["tokenizer"] = self._tokenizer_of(processor.owner)
            start = processor.start and [*processor.start]  # lists, because JSON has no tuples
            grammar = {"source": [*processor.compiled.source], "start": start}
        if objects:
            self._used[request.request_id] = _Used([*objects.values()], task_id, task)
        plain = {"time": now, "objects": objects, "grammar": grammar}
        head = orjson.dumps(plain | {"num_forgets": 0 if task is None else task.num_forgets})
        data = b"".join((_LENGTH.pack(len(head)), head, pack_requests([bare])))
        if len(data) > MAX_RECORD_BYTES // 2:  # with its progress, it must still fit into a record
            raise JournalError(f"it has {len(data)} bytes, at most {MAX_RECORD_BYTES // 2} fit")
        return data

    def _adapter_of(self, request: InferenceRequest) -> tuple[int | None, _Task | None]:
        """Store the adapter of a request, and remove its tensors from the request.

        Return the task id and the adapter.
        """
        tensors = request.tensors
        task_id = _task_id_of(request)
        if task_id is None:
            return None, None
        given = {name: tensors.pop(name) for name in _ADAPTER if name in tensors}
        if given and not (task_id in self._tasks and self._given.get(task_id, _never_same)(given)):
            packed = pack_requests([InferenceRequest(0, given)])
            digest, before = self._folder.put(packed, syncs=self._syncs), self._tasks.get(task_id)
            task = _Task(digest, self._num_forgets if before is None else before.num_forgets)
            if self._note_task(task_id, task):
                self._given[task_id] = _same_as(given)
            return task_id, task
        if task_id in self._tasks:
            self._tasks.move_to_end(task_id)
        return task_id, self._tasks.get(task_id)

    def _note_task(self, task_id: int, task: _Task) -> bool:
        """Note `task` as the adapter of later requests that pass only the task id.

        Return False if the manager keeps another adapter under this id, and will refuse `task`.
        """
        before = self._tasks.get(task_id, task)
        if before.digest != task.digest and before.num_forgets == task.num_forgets:
            own = task_id, before
            if self.is_cached(task_id) or any(it[1:] == own for it in self._used.values()):
                return False
        self._tasks[task_id] = task
        self._tasks.move_to_end(task_id)
        if len(self._tasks) > _MOST_TASKS:
            self._given.pop(self._tasks.popitem(last=False)[0], None)
        return True

    def _tokenizer_of(self, guide: GuidedDecoding) -> str:
        known = self._guide_digests.get(id(guide))
        if known is None or known[0] is not guide:
            data = orjson.dumps({"tokenizer": guide.given[0], "end_ids": guide.given[1]})
            known = guide, self._folder.put(data, syncs=self._syncs)
            self._guide_digests[id(guide)] = known
            self._guides[known[1]] = guide
        return known[1]

    def forget_tasks(self, task_ids: Iterable[int]) -> None:
        """Forget the adapters of these tasks. Later requests must pass the weights again."""
        for task_id in task_ids:
            self._num_forgets += 1
            self._tasks.pop(task_id, None)
            self._given.pop(task_id, None)

    def end(self, request_ids: Iterable[int]) -> None:
        """Remove the objects of these requests that no unfinished or later request can use."""
        if not self._used:
            return
        ended = [self._used.pop(i) for i in request_ids if i in self._used]
        gone = [digest for it in ended for digest in it.digests]
        if not self._kept().issuperset(gone):
            self.remove_unused()

    def remove_unused(self) -> None:
        """Remove all objects that no unfinished or later request can use."""
        self._folder.keep_only(self._kept())

    def _kept(self) -> set[str]:
        tasks = (it.digest for it in self._tasks.values())
        return {*tasks, *self._guides}.union(*(it.digests for it in self._used.values()))

    # From bytes ------------------------------------------------------------------------------

    def read(self, data: bytes) -> Accepted:
        """Return the request from which `pack` made `data`. Raise JournalError for other bytes."""
        try:
            (size,) = _LENGTH.unpack_from(data)
            head = orjson.loads(data[_LENGTH.size : _LENGTH.size + size])
            [request] = unpack_requests(data[_LENGTH.size + size :])
            objects = {str(kind): str(digest) for kind, digest in head["objects"].items()}
            num_forgets = int(head.get("num_forgets", 0))
            return Accepted(request, float(head["time"]), objects, head["grammar"], num_forgets)
        except Exception as error:  # bytes of another program, with a correct checksum
            raise JournalError(f"an accepted request cannot be read: {error}") from error

    def restore(self, accepted: Accepted) -> InferenceRequest:
        """Return the request with its objects. Raise JournalError if they cannot be read."""
        request, objects = accepted.request, accepted.objects
        task_id, task = _task_id_of(request), None
        if "adapter" in objects:
            task = _Task(objects["adapter"], accepted.num_forgets)
        if objects:
            self._used[request.request_id] = _Used([*objects.values()], task_id, task)
        if task is not None:
            [found] = unpack_requests(self._folder.get(task.digest))
            request.tensors.update(found.tensors)
            if task_id is not None:
                self._note_task(task_id, task)
                self._num_forgets = max(self._num_forgets, task.num_forgets)
        if accepted.grammar is not None and "tokenizer" in objects:
            guide, grammar = self._guide(objects["tokenizer"]), accepted.grammar
            source, start = _source(grammar["source"]), grammar["start"]
            made = grammar_of(guide, source)
            request.logits_post_processor = (
                made if start is None else made.after(GrammarStart(tuple(start[0]), *start[1:]))
            )
        return request

    def renews_adapter(self, accepted: Accepted) -> bool:
        """Return whether the adapter was forgotten between an earlier request and `accepted`.

        The earlier request has been restored, and has the same task id. Call this method before
        `restore` is called for `accepted`.
        """
        task_id = _task_id_of(accepted.request)
        if task_id is None or "adapter" not in accepted.objects:
            return False
        task = self._tasks.get(task_id)
        return task is not None and task.num_forgets != accepted.num_forgets

    def _guide(self, digest: str) -> GuidedDecoding:
        if digest not in self._guides:
            given = orjson.loads(self._folder.get(digest))
            guide = GuidedDecoding(Tokenizer.from_str(given["tokenizer"]), given["end_ids"])
            self._guides[digest] = guide
            self._guide_digests[id(guide)] = guide, digest
        return self._guides[digest]


def _task_id_of(request: InferenceRequest) -> int | None:
    """Return the task id of a request; None if it has none, or if admission would refuse it."""
    if "lora_task_id" not in request.tensors:
        return None
    with suppress(InvalidRequestError):
        return read_int("lora_task_id", request.tensors["lora_task_id"], 0, 2**64 - 1)
    return None


def _never_same(given: Mapping[str, Any]) -> bool:
    return False


def _same_as(tensors: Mapping[str, Any]) -> _IsSame:
    """Return a function that tests whether an adapter's tensors are `tensors`, unchanged.

    Most hosts pass the same torch tensor with each request, which then is not read and hashed
    again. For other types the function returns False, because only torch counts changes in place.
    """
    weights = tensors.get("lora_weights")
    if type(weights) is not torch.Tensor or weights.is_inference():
        return _never_same
    found, version = weakref.ref(weights), weights._version
    rest = pack_requests([InferenceRequest(0, {**tensors, "lora_weights": _NO_WEIGHTS})])

    def is_same(given: Mapping[str, Any]) -> bool:
        own = given.get("lora_weights")
        return (
            isinstance(own, torch.Tensor)
            and own is found()
            and own._version == version
            and pack_requests([InferenceRequest(0, {**given, "lora_weights": _NO_WEIGHTS})]) == rest
        )

    return is_same


def _source(plain: Any) -> GrammarSource:
    kind, text, rules, lenient = plain
    return GrammarSource(kind, text, tuple(map(tuple, rules)), tuple(lenient))


def pack_response(request_id: int, tensors: Iterable[NamedTensor], error: str) -> bytes:
    """Return a final response as bytes, without tensors over 16 MiB, which are logits."""
    kept = {name: tensor for name, tensor in tensors if tensor.nbytes <= _MOST_TENSOR_BYTES}
    text = error.encode()
    return b"".join(
        (_LENGTH.pack(len(text)), text, pack_requests([InferenceRequest(request_id, kept)]))
    )


def read_response(data: bytes) -> tuple[list[NamedTensor], str]:
    """Return the tensors and the error text of a response. Raise JournalError for other bytes."""
    try:
        (size,) = _LENGTH.unpack_from(data)
        [found] = unpack_requests(data[_LENGTH.size + size :])
        tensors: Any = found.tensors
        error = data[_LENGTH.size : _LENGTH.size + size].decode()
        return [NamedTensor(name, tensor) for name, tensor in tensors.items()], error
    except Exception as error_:  # bytes of another program, with a correct checksum
        raise JournalError(f"a final response cannot be read: {error_}") from error_
