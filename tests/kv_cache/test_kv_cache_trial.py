"""The random KV operations beside a model: a sample of them, and that they find mistakes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz import FUZZ
from kv_cache_model import Divergence, KvCacheModel, Options
from kv_cache_trial import main, run_episode, run_trial

from gptmanager.kv_cache import KvCacheManager, block_reuse, offloading, prefix_lookups
from gptmanager.kv_cache.block import BlockPool, BlockTables
from gptmanager.request.llm_request import LlmRequest

ROOT = Path(__file__).resolve().parent.parent.parent
OPERATIONS = 10_000 * FUZZ


def test_a_sample_of_the_operations_diverges_nowhere():
    done = run_trial(OPERATIONS)
    assert done.total() >= OPERATIONS
    share = {kind: count / done.total() for kind, count in done.items()}
    assert {"add refused", "add token refused", "fork refused", "rewind refused"} <= set(share)
    for kind in ("add", "add reusing", "remove", "fork", "rewind", "what if"):
        assert share[kind] > (0.005 if kind == "add reusing" else 0.01), share
    assert done["add onboarding"] > 5 and done["add onboarding with beams"], done
    assert done["add reusing with beams"] > 0.003 * done.total(), done
    assert 0.3 < share["add token"] + share["context"] < 0.7, share


def spoil(monkeypatch, owner, name, spoilt):
    right = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: spoilt(right, *args, **kwargs))


def too_few(right, self, request, *args):
    return max(0, right(self, request, *args) - 1)


def too_many(right, self, request, *args):
    return right(self, request, *args) + 1


def leaks(right, self, blocks):
    return right(self, [*blocks][:-1])


def without_copies(right, self, *args):
    right(self, *args)
    return ()


def silent(right, self, request_id, *args):
    return right(self, request_id, *args) if request_id in self else None


def found_too_much(right, self, request):
    copies = right(self, request)
    if 0 < request.context_current_position < request.prompt_len - 1:
        request.context_current_position += 1
    return copies


def newest_first(right, self, count, references=1):
    for block in [*self.free][::-1]:
        self.free.move_to_end(block)
    return right(self, count, references)


def blind_what_if(right, self, request_id):
    return None


def greedy_host(right, self, *args):
    """Takes everything, for anything."""
    right(self, *args)
    self.min_priority = self.min_tokens = 0


def uncopied(right, self, *args):
    new = right(self, *args)
    self.copies.pop()
    return new


def unmoved(right, self, *args):
    """What a block held is lost as it goes."""
    return None


def for_one_beam(right, self, blocks, references=1):
    return right(self, blocks)


def first_beam_whole(right, self, sequence, store):
    """What only one of several beams has generated is left to be found."""
    first = BlockTables(sequence.request_id, sequence.num_slots, sequence.tables[:1])
    first.num_cached = sequence.num_cached
    return right(self, first, store)


MISTAKES = [
    (
        block_reuse.CachingBlockPool,
        "share",
        for_one_beam,
        r"counts 1 references, but \d tables hold it",
    ),
    (block_reuse.BlockReuse, "end", first_beam_whole, "goes before|blocks for|tokens found|not of"),
    (offloading.HostTier, "__init__", greedy_host, "copies|the copy"),
    (offloading.CachingBlockPool, "onboard", uncopied, "no copy of|is not of"),
    (offloading.CachingBlockPool, "_offload", unmoved, "no copy of"),
    (KvCacheManager, "get_needed_blocks_one_step", too_few, "blocks for"),
    (KvCacheManager, "get_needed_resource_to_completion", too_many, "blocks for the context and"),
    (KvCacheManager, "num_tokens", too_many, "tokens stored"),
    (KvCacheManager, "sum_remaining_blocks_to_completion", too_many, "until all their ends"),
    (KvCacheManager, "get_remaining_blocks_to_completion", too_few, "blocks until its end"),
    (BlockPool, "release", leaks, r"counts \d references, but 0 tables hold it"),
    (KvCacheManager, "fork", without_copies, "does not hold position"),
    (KvCacheManager, "remove", silent, "mistake did not raise ValueError"),
    (KvCacheManager, "add_sequence", found_too_much, "tokens found"),
    (
        KvCacheManager,
        "add_sequence",
        without_copies,
        "no copy of|begins as none|does not hold position",
    ),
    (KvCacheManager, "scheduling_remove_sequence", blind_what_if, "one more blocks free without"),
    (block_reuse.CachingBlockPool, "take", newest_first, r"block \d+.* goes before"),
]


@pytest.mark.parametrize(("owner", "name", "mistake", "text"), MISTAKES)
def test_a_mistake_in_the_kv_cache_is_found(monkeypatch, owner, name, mistake, text):
    spoil(monkeypatch, owner, name, mistake)
    with pytest.raises(Divergence, match=text):
        run_trial(60_000)


def test_a_salt_that_is_overlooked_is_found(monkeypatch):
    for module in (block_reuse, prefix_lookups):
        monkeypatch.setattr(module, "root_key", lambda request: request.lora_task_id)
    with pytest.raises(Divergence, match="goes before|tokens found|blocks for"):
        run_trial(20_000)


def test_a_block_that_is_reused_too_early_is_found(monkeypatch):
    """What a sequence shares before its tokens are computed."""

    def store_at_once(right, self, request):
        copies = right(self, request)
        self._reuse.store_context(self._live[request.request_id], request)
        return copies

    spoil(monkeypatch, KvCacheManager, "add_sequence", store_at_once)
    with pytest.raises(Divergence, match="tokens found|blocks for|goes before"):
        run_trial(20_000)


def test_the_model_refuses_a_write_to_what_can_be_found():
    model = KvCacheModel(Options(4, 2, reuse="whole"))
    model.contents[1] = 0, (5, 6)
    life = model.new_life(LlmRequest(0, [1, 2], 1))
    life.tables = [[1]]
    with pytest.raises(Divergence, match="block 1 can be found and is written to"):
        model.write(life, 1)


def test_a_divergence_names_the_episode_that_repeats_it(monkeypatch, capsys):
    spoil(monkeypatch, KvCacheManager, "fork", without_copies)
    assert main(["--operations", "5000", "--seed", "3"]) == 1
    told = capsys.readouterr().err.splitlines()[-1]
    number = int(told.split("episode ")[1].split()[0])
    assert "of seed 3, operation " in told and "Options(num_blocks=" in told
    with pytest.raises(Divergence) as raised:
        run_episode(3, number)
    assert str(raised.value) == told
    assert main(["--seed", "3", "--episode", str(number)]) == 1


def test_the_command_says_what_was_done():
    trial = ROOT / "tests/kv_cache/kv_cache_trial.py"
    command = [sys.executable, str(trial), "--operations", "300"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )
    last = done.stdout.splitlines()[-1]
    assert last.endswith("operations, check() after each: 0 divergences, 0 leaks")
    assert not done.stderr
