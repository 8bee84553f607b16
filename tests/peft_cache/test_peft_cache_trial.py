"""Random operations on a LoRA cache beside a plain model, and that they find mistakes."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from fuzz import FUZZ
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from peft_cache_proof import Divergence, PeftCacheProof

from gptmanager.kv_cache import LedgerError
from gptmanager.peft_cache import PeftCacheManager, manager
from gptmanager.peft_cache.layout import Packing, RowPlace
from gptmanager.peft_cache.page_eviction import AdapterPages, CachedAdapter

OPERATIONS = 40_000 * FUZZ
FOUND = (Divergence, LedgerError, LookupError)


def run_episode(seed, length=400):
    chance = random.Random(seed)
    proof = PeftCacheProof(chance.randint(1, 16), chance.randint(1, 10))
    kinds = ("put", "use", "ensure", "loaded", "copied", "pause", "release", "forget", "take_freed")
    weights = (8, 6, 12, 6, 6, 2, 8, 1, 1)
    for kind in chance.choices((*kinds, "restore"), (*weights, 0.2), k=length):
        step(proof, kind, chance.randrange(10), chance.randrange(6), chance.randrange(2), chance)
    for request in range(10):
        proof.release(request)
    finish(proof, "loaded")
    finish(proof, "copied")
    for task in range(6):
        proof.forget(task)
    counts = proof.cache.counts()
    assert counts.host_used_pages == counts.device_used_pages == 0  # none leaked
    proof.take_freed()
    assert not proof.on_host
    return proof.operations


def finish(proof, kind):
    while waiting := [a for a in proof.model.all if getattr(a, UNFINISHED[kind])]:
        getattr(proof, kind)(waiting[0])


UNFINISHED = {"loaded": "loading", "copied": "copying"}


def step(proof, kind, request, task, variant, chance):
    if kind == "put":
        proof.put(request, task, f"{task} {variant if chance.random() < 0.1 else 0}")
    elif kind == "use":
        proof.use(request, task)
    elif kind in UNFINISHED:
        waiting = [a for a in proof.model.all if getattr(a, UNFINISHED[kind])]
        if waiting:
            getattr(proof, kind)(chance.choice(waiting))
    elif kind == "forget":
        proof.forget(task)
    elif kind in ("take_freed", "restore"):
        getattr(proof, kind)()
    else:
        getattr(proof, kind)(request)


def test_random_operations_diverge_nowhere_and_leak_no_page():
    done: Counter[str] = Counter()
    seed = 0
    while done.total() < OPERATIONS:
        done += run_episode(seed)
        seed += 1
    for kind in (
        "put new", "put known", "put wait", "put refused", "use", "use refused", "loaded", "copied",
        "ensure there", "ensure copy", "ensure wait", "pause", "release", "forget", "restore",
    ):  # fmt: skip
        assert done[kind] > 0.001 * done.total(), done


class PeftCacheMachine(RuleBasedStateMachine):
    requests, tasks = st.integers(0, 5), st.integers(0, 3)

    @initialize(host=st.integers(0, 9), device=st.integers(0, 6))
    def begin(self, host, device):
        self.proof = PeftCacheProof(host, device)

    @rule(request=requests, task=tasks, variant=st.integers(0, 1))
    def put(self, request, task, variant):
        self.proof.put(request, task, f"{task} {variant}")

    @rule(request=requests, task=tasks)
    def use(self, request, task):
        self.proof.use(request, task)

    @rule(kind=st.sampled_from(["ensure", "pause", "release"]), request=requests)
    def of_request(self, kind, request):
        getattr(self.proof, kind)(request)

    @rule(kind=st.sampled_from([*UNFINISHED]), index=st.integers(0, 3))
    def finish(self, kind, index):
        waiting = [a for a in self.proof.model.all if getattr(a, UNFINISHED[kind])]
        if waiting:
            getattr(self.proof, kind)(waiting[index % len(waiting)])

    @rule(task=tasks)
    def forget(self, task):
        self.proof.forget(task)

    @rule(kind=st.sampled_from(["take_freed", "restore"]))
    def of_all(self, kind):
        getattr(self.proof, kind)()


TestPeftCache = PeftCacheMachine.TestCase
TestPeftCache.settings = settings(
    max_examples=12 * FUZZ, stateful_step_count=40, deadline=None, derandomize=True
)


def leaks(right, self, adapter):
    pages = right(self, adapter)
    if len(pages) > 1:
        self.free.remove(pages[0])
    return pages


def newest_first(right, self, *args):
    self.adapters = type(self.adapters)(reversed(self.adapters.items()))
    found = right(self, *args)
    self.adapters = type(self.adapters)(reversed(self.adapters.items()))
    return found


def one_too_many(right, self, num_pages, stays):
    found = right(self, num_pages, stays)
    others = [a for a in self.adapters if not stays(a) and a not in (found or ())]
    return found if found is None else found + others[:1]


def takes_anything(right, self, num_pages, stays):
    return right(self, num_pages, lambda adapter: False)


def touches_nothing(right, self, adapter):
    return None


def twice(right, self, adapter):
    right(self, adapter)
    first = next(iter(self.adapters.values()))
    if len(first) == adapter.num_pages:
        self.adapters[adapter] = first


def pins_nothing(right, self, request_id):
    copies = right(self, request_id)
    self.adapter_of(request_id).running.clear()
    return copies


def unpins_all(right, self, request_id):
    adapter = self._by_request.get(request_id)
    right(self, request_id)
    if adapter is not None:
        adapter.running.clear()


def keeps_replaced(right, self, adapter):
    return None


def copy_is_done(right, self, adapter):
    copies = right(self, adapter)
    adapter.is_copying = False
    return copies


def fewer_elements(right, self, adapter):
    return tuple(copy._replace(num_elements=copy.num_elements - 8) for copy in right(self, adapter))


def any_content(right, self, request_id, task_id, digest, rows):
    if task_id in self:
        digest = self._by_task[task_id].digest
    return right(self, request_id, task_id, digest, rows)


def overlaps(right, *arguments):
    packing = right(*arguments)
    places = (RowPlace(page, max(0, offset - 8)) for page, offset in packing.places)
    return Packing(tuple(places), packing.lengths)


def ends_at_once(right, self, task_id):
    adapter = self._by_task.get(task_id)
    done = right(self, task_id)
    if adapter is not None and adapter.requests and not adapter.is_replaced:
        return done
    for request_id in [*adapter.requests] if adapter is not None else ():
        self.release(request_id)
    return done


MISTAKES = {
    leaks: (AdapterPages, "drop"),
    newest_first: (AdapterPages, "to_evict"),
    one_too_many: (AdapterPages, "to_evict"),
    takes_anything: (AdapterPages, "to_evict"),
    touches_nothing: (AdapterPages, "touch"),
    twice: (AdapterPages, "take"),
    pins_nothing: (PeftCacheManager, "ensure"),
    unpins_all: (PeftCacheManager, "release"),
    keeps_replaced: (PeftCacheManager, "_drop_if_unused"),
    copy_is_done: (PeftCacheManager, "_copy"),
    fewer_elements: (PeftCacheManager, "_copy"),
    any_content: (PeftCacheManager, "put"),
    overlaps: (manager, "pack"),
    ends_at_once: (PeftCacheManager, "forget"),
}


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_planted_mistake_is_found(monkeypatch, mistake):
    owner, name = MISTAKES[mistake]
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: mistake(right, *args))
    with pytest.raises(FOUND):
        for seed in range(10):
            run_episode(seed)


@pytest.mark.parametrize("stays", ["stays_on_host", "stays_on_device"])
def test_an_adapter_that_goes_although_it_is_needed_is_found(monkeypatch, stays):
    monkeypatch.setattr(CachedAdapter, stays, property(lambda self: False))
    with pytest.raises(FOUND):
        for seed in range(10):
            run_episode(seed)
