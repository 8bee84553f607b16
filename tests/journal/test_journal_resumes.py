"""A manager dies in the middle of requests of all kinds; the next one, or its ranks, go on."""

import logging
import shutil
import time

import numpy as np
import pytest
from journaled_runs import Output, outputs_of
from rank_managers import rank_managers

from gptmanager import (
    Delivered,
    FinishReason,
    GptManager,
    InferenceRequest,
    KvCacheConfig,
    ModelType,
    OptionalParams,
    PeftCacheManagerConfig,
)
from gptmanager.callbacks import broadcast
from gptmanager.config import PromptLookup
from gptmanager.journal import resuming

MODEL = "examples/tiny_llama"
SAMPLED = {"temperature": 1.0, "runtime_top_k": 20}
STREAMED = (1, 3, 4, 5, 6, 8, 9)
DEADLINE, DEADLINE_S = 8, 500.0


def requests_of(guided):
    weights = np.random.default_rng(1).normal(0, 0.3, (1, 4 * 256)).astype(np.float32)
    adapter = {"lora_weights": weights, "lora_config": np.array([[1, 0, 4]], dtype=np.int32)}
    regex = guided.regex(r"[A-Z][a-z]{2,5} (had|lost) a (red|blue|green) ball\.")
    schema = guided.json_schema({"type": "array", "items": {"enum": [7, 8]}, "minItems": 8})
    named = {
        1: {**SAMPLED, "random_seed": 1, "end_id": 0, "logits_post_processor": regex},
        2: {**SAMPLED, "random_seed": 2, "end_id": 0, "logits_post_processor": schema},
        3: {"input_ids": [5, 6, 7, 8] * 4},
        4: {"draft_input_ids": [9, 10, 11]},
        5: {"lora_task_id": 7, **adapter},
        6: {"lora_task_id": 7},
        7: {"beam_width": 2},
        DEADLINE: {"deadline_s": DEADLINE_S},
        9: SAMPLED,
    }
    made = []
    for number, given in named.items():
        prompt = given.pop("input_ids", [number, 40, 41])
        streams = number in STREAMED
        made.append(InferenceRequest.from_tokens(number, prompt, 24, is_streaming=streams, **given))
    return made


class Host:
    """Returns `requests`, and keeps the responses. `deaths`: how many responses it has when the
    journal in `folder` is copied, as if the process died then; the copies are called by them.
    """

    def __init__(self, requests, folder=None, deaths=(), had=()):
        self.waiting, self.folder, self.deaths = requests, folder, deaths
        self.got = []
        self.had = outputs_of(had)

    def get(self, room):
        taken, self.waiting = self.waiting, []
        ended = {request_id for _, request_id, _, is_final, _ in self.got if is_final}
        return [it for it in taken if it.request_id not in ended]  # it was sent again

    def send(self, *response):
        self.got.append((0, *response))
        if len(self.got) in self.deaths:
            shutil.copytree(self.folder, f"{self.folder}-{len(self.got)}")

    def restore(self, request_id):
        output = self.had.get(request_id, Output())
        return Delivered(len(output.tokens), output.num_finals > 0)


def params_of(host, folder, **more):
    return OptionalParams(
        journal_path=folder,
        restore_cb=host.restore,
        kv_cache_config=KvCacheConfig(max_tokens=2048, tokens_per_block=8),
        max_batch_size=12,
        max_seq_len=128,
        deterministic=True,
        exclude_input_in_output=True,
        speculative_decoding_config=PromptLookup(),
        **more,
    )


def run(host, folder):
    pages = PeftCacheManagerConfig(num_host_module_layer=96, num_device_module_layer=96)
    params = params_of(host, folder, peft_cache_manager_config=pages)
    fused = ModelType.INFLIGHT_FUSED_BATCHING
    with GptManager(MODEL, fused, 2, None, host.get, host.send, optional_params=params) as manager:
        assert manager.wait_idle(60)
    return host.got


@pytest.fixture(scope="module")
def life(tmp_path_factory, guided):
    """A life that nothing interrupts, with its journal's copies."""
    folder = tmp_path_factory.mktemp("life") / "journal"
    host = Host(requests_of(guided), folder, deaths=(1, 30, 90))
    run(host, folder)
    return host


def left(guided, has):
    ended = {request_id for request_id, output in outputs_of(has).items() if output.num_finals}
    return [it for it in requests_of(guided) if it.request_id not in ended]


@pytest.mark.parametrize("death", [1, 30, 90])
@pytest.mark.every(2)
def test_requests_of_all_kinds_continue_as_if_nothing_was(life, guided, death, tmp_path, caplog):
    whole, has = outputs_of(life.got), life.got[:death]
    assert [error for output in whole.values() for error in output.errors] == []
    host = Host(left(guided, has), had=has)
    caplog.set_level(logging.INFO, "gptmanager")
    run(host, shutil.copytree(f"{life.folder}-{death}", tmp_path / "journal"))
    assert "/journal: requests that continue: " in caplog.text
    found = outputs_of(has, host.got)
    for number, output in whole.items():
        assert found[number].errors == [], number
        assert found[number].tokens == output.tokens, number
        assert found[number].reason == output.reason
    assert all(found[n].num_finals == 1 for n in range(1, 10))


def test_a_deadline_goes_on_while_no_process_runs(life, tmp_path, monkeypatch):
    monkeypatch.setattr(resuming, "system_time", lambda: time.time() + DEADLINE_S)
    has = life.got[:30]
    host = Host([], had=has)
    run(host, shutil.copytree(f"{life.folder}-30", tmp_path / "journal"))
    found, whole = outputs_of(has, host.got), outputs_of(life.got)[DEADLINE].tokens
    assert found[DEADLINE].errors == []
    assert found[DEADLINE].reason == FinishReason.TIMED_OUT
    assert len(found[DEADLINE].tokens) < len(whole)
    assert found[DEADLINE].tokens == whole[: len(found[DEADLINE].tokens)]
    assert all(it.reason != FinishReason.TIMED_OUT for n, it in found.items() if n != DEADLINE)


def test_a_context_that_is_too_long_to_compute_again_ends_only_its_request(tmp_path):
    """Without chunks: prompt and output together exceed the tokens of a step."""

    def live(host, folder):
        params = params_of(host, folder, max_num_tokens=16, enable_chunked_context=False)
        fused = ModelType.INFLIGHT_FUSED_BATCHING
        given = MODEL, fused, 1, None, host.get, host.send
        with GptManager(*given, optional_params=params) as manager:
            assert manager.wait_idle(60)
            assert manager.audit().ok
        return host.got

    folder = tmp_path / "journal"
    asked = [
        InferenceRequest.from_tokens(1, [5, 6, 7], 100, is_streaming=True),
        InferenceRequest.from_tokens(2, [5, 6, 8], 100),
    ]
    whole = live(Host(asked, folder, deaths=(15,)), folder)
    found = outputs_of(whole[:15], live(Host([], had=whole[:15]), f"{folder}-15"))
    [error] = found[1].errors
    assert error.startswith("CapacityError: the request must compute its ")
    assert error.endswith("at most 16 tokens: set enable_chunked_context")
    assert not found[2].errors and found[2].tokens == outputs_of(whole)[2].tokens


def test_a_final_that_was_written_but_not_sent_is_sent_once(tmp_path):
    """Two requests end in one step; the process dies when the first one's final has been sent."""
    folder = tmp_path / "journal"
    asked = [InferenceRequest.from_tokens(number, [number, 6, 7], 4) for number in (1, 2)]
    whole = run(Host(asked, folder, deaths=(1,)), folder)
    first, second = ((number, is_final) for _, number, _, is_final, _ in whole)
    assert {first, second} == {(1, True), (2, True)}

    host = Host([], had=whole[:1])
    run(host, f"{folder}-1")

    [(_, number, _, is_final, error)] = host.got
    assert (number, is_final) == second and not error
    assert outputs_of(host.got)[number].tokens == outputs_of(whole)[number].tokens


def test_rank_0_has_the_journal_and_all_ranks_resume_alike(tmp_path, guided, monkeypatch):
    def asked():
        return [it for it in requests_of(guided) if it.request_id in (1, 2, 3, 9)]

    def live(host, folder):
        hosts = [host, Host([])]

        def make(rank, params):
            own = params_of(hosts[rank], folder)
            own.parallel_config = params.parallel_config
            get, poll = broadcast(host.get, set) if rank == 0 else broadcast()
            fused = ModelType.INFLIGHT_FUSED_BATCHING
            return GptManager(
                *(MODEL, fused, 1, None, get, hosts[rank].send, poll), optional_params=own
            )

        with rank_managers(monkeypatch, make, 2) as managers:
            assert managers[0].wait_idle(60)
        assert [manager.exception for manager in managers] == [None, None]
        assert not hosts[1].got
        return host.got

    folder = tmp_path / "journal"
    whole = live(Host(asked(), folder, deaths=(20,)), folder)
    assert [error for *_, error in whole if error] == []
    found = live(Host([], had=whole[:20]), f"{folder}-20")
    assert {n: it.tokens for n, it in outputs_of(whole[:20], found).items()} == {
        n: it.tokens for n, it in outputs_of(whole).items()
    }
