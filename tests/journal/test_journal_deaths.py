"""A process dies at any byte of its journal; the next one goes on: no token is lost or doubled."""

import struct
from dataclasses import replace
from pathlib import Path

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from fuzz import FUZZ
from hypothesis import given, settings
from journaled_runs import JournaledRun, Output, die_at, outputs_of
from loop_driver import expected_output
from shorthand import request

from gptmanager import InferenceRequest, NamedTensor, OptionalParams, ParallelConfig
from gptmanager.config import Delivered
from gptmanager.errors import CallbackError, JournalError
from gptmanager.journal.accepted import AcceptedRequests, pack_response
from gptmanager.journal.entries import Entries, Entry, Sent
from gptmanager.journal.records import Kind
from gptmanager.journal.resuming import _again, resume
from gptmanager.journal.segments import JournalFolder
from gptmanager.step import Extras
from gptmanager.testing.scripted_executor import ScriptedExecutor

PROMPTS = [[1, 2, 3], [7], [4, 4, 9, 1, 2, 8, 3], [5, 6]]


def draw_requests(draw):
    made = []
    for index, prompt in enumerate(PROMPTS[: draw(st.integers(1, 4))]):
        made.append((index, prompt, draw(st.integers(1, 9)), draw(st.booleans())))
    return made


def requests_of(drawn):
    return [
        request(number, prompt, length, is_streaming=streams)
        for number, prompt, length, streams in drawn
    ]


@settings(max_examples=25 * FUZZ, deadline=None)
@given(data=st.data())
def test_the_output_of_two_lives_is_that_of_one(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("journal")
    drawn = draw_requests(data.draw)
    run_ahead = data.draw(st.integers(0, 1))
    keeps_record = data.draw(st.booleans())
    record = {} if keeps_record else None
    first = JournaledRun(folder, requests_of(drawn), record=record, run_ahead=run_ahead)
    start = first.size()
    first.run()
    # the length of a record depends on the time
    size = start + (first.size() - start) * data.draw(st.integers(0, 1000)) // 1000
    # a response may be in flight at the death, if its record is complete
    has = [life for life in first.host.got if life[0] <= size]
    num_late = sum(life[0] == max((life[0] for life in has), default=0) for life in has)
    num_lost = data.draw(st.integers(0, num_late)) if keeps_record else 0
    has = has[: len(has) - num_lost]
    before = outputs_of(has)
    if keeps_record:
        record = {
            number: Delivered(
                len(before[number].tokens) if number in before else 0,
                number in before and bool(before[number].num_finals),
            )
            for number, *_ in drawn
        }
    left = [it for it in requests_of(drawn) if not before.get(it.request_id, Output()).num_finals]
    second = JournaledRun(die_at(folder, size), left, record=record, run_ahead=run_ahead)
    second.run()
    found = outputs_of(has, second.host.got)
    for number, prompt, length, streams in drawn:
        whole = expected_output(prompt, length)
        assert found[number].num_finals == 1
        assert not found[number].errors
        assert found[number].tokens == (whole if streams else prompt + whole)


def test_a_torn_record_is_cut_off_and_damage_elsewhere_names_its_offset(tmp_path, caplog):
    folder = tmp_path / "journal"
    first = JournaledRun(folder, [request(1, [1, 2], 6, is_streaming=True)])
    first.run()
    size = first.size()
    torn = die_at(folder, size - 1)
    second = JournaledRun(torn, [])
    assert "was not written completely" in caplog.text
    second.run()
    segment = first.segment()
    whole = bytearray(segment.read_bytes())
    for offset in (3, 20, size // 2):
        damaged = bytearray(whole)
        damaged[offset] ^= 1
        segment.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"the record at offset \d+ is damaged"):
            JournaledRun(folder, [])


def test_beams_start_anew_and_send_nothing_twice(tmp_path):
    folder = tmp_path / "journal"
    asked = [request(1, [1, 2, 3], 8, beam_width=2), request(2, [4, 5], 8, beam_width=3)]
    first = JournaledRun(folder, asked)
    first.run()
    whole = {life[1]: dict(life[2]) for life in first.host.got}
    second = JournaledRun(die_at(folder, first.size() - 1), [])
    second.run()
    assert len(second.resumption.requests) == 2
    for _, request_id, tensors, is_final, error in second.host.got:
        assert is_final and not error
        ids = whole[request_id]["output_ids"]
        assert dict(tensors)["output_ids"].tolist() == ids.tolist()


def test_log_probs_continue_and_their_sum_counts_both_lives(tmp_path, monkeypatch):
    result = ScriptedExecutor.result

    def with_log_probs(self, step):
        found = result(self, step)
        return replace(found, extras=Extras(-1 - found.tokens.astype(np.float32)))

    monkeypatch.setattr(ScriptedExecutor, "result", with_log_probs)
    folder = tmp_path / "journal"
    asked = request(1, [1, 2, 3], 8, is_streaming=True, return_log_probs=True)
    first = JournaledRun(folder, [asked])
    start = first.size()
    first.run()
    end = next(life[0] for life in first.host.got[3:])
    second = JournaledRun(die_at(folder, end), [])
    assert start < end < first.size()
    second.run()
    sums = [
        dict(life[2])["cum_log_probs"].item() for life in (first.host.got[-1], second.host.got[-1])
    ]
    assert sums[0] == pytest.approx(sums[1]) and sums[0] <= -8


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_a_host_with_more_tokens_than_the_responses_gets_the_rest_of_each_output(extra):
    last = {
        "output_ids": torch.tensor([[[7, 8, 9]]], dtype=torch.int32),
        "sequence_length": torch.tensor([[3]], dtype=torch.int32),
        "output_log_probs": torch.tensor([[[-1.0, -2.0, -3.0]]]),
        "cum_log_probs": torch.tensor([[-9.0]]),
        "output_offset": torch.tensor([4], dtype=torch.int32),
    }
    entry = Entry(b"", last=pack_response(1, map(NamedTensor._make, last.items()), ""))
    ((_, tensors, is_final, error),) = _again(1, entry, 4 + extra)
    found = {name: tensor.flatten().tolist() for name, tensor in tensors}
    assert is_final and not error
    assert found == {
        "output_ids": [7, 8, 9][extra:],
        "sequence_length": [3 - extra],
        "output_log_probs": [-1.0, -2.0, -3.0][extra:],
        "cum_log_probs": [-9.0],
        "output_offset": [4 + extra],
    }


def test_a_host_with_fewer_tokens_than_were_sent_first_gets_those_that_it_lacks():
    last = {
        "output_ids": torch.tensor([[[7]]], dtype=torch.int32),
        "sequence_length": torch.tensor([[1]], dtype=torch.int32),
        "output_offset": torch.tensor([4], dtype=torch.int32),
    }
    packed = pack_response(1, map(NamedTensor._make, last.items()), "")
    first, (_, tensors, is_final, _) = _again(1, Entry(b"", tokens=[3, 4, 5, 6], last=packed), 1)
    assert {name: tensor.tolist() for name, tensor in first[1]} == {
        "output_ids": [[[4, 5, 6]]],
        "sequence_length": [[3]],
        "output_offset": [1],
    }
    assert first[2:] == (False, "") and is_final
    assert dict(tensors)["output_ids"].tolist() == [[[7]]]


@pytest.mark.parametrize(
    ("asked", "option", "has", "kept"),
    [
        ({}, None, 1, 3),
        ({"return_generation_logits": True}, None, 1, 1),
        ({"num_top_log_probs": 2}, None, 3, 3),
        ({}, "gather_generation_logits", 1, 1),
        ({"num_prompt_log_probs": 0}, None, 1, 3),
        ({"num_prompt_log_probs": 0}, None, 0, 0),
        ({}, "gather_context_logits", 0, 0),
    ],
)
def test_tokens_that_a_host_lacks_are_computed_again_with_outputs_that_the_journal_lacks(
    tmp_path, asked, option, has, kept
):
    run = JournaledRun(tmp_path / "journal", [request(1, [1, 2], 9, is_streaming=True, **asked)])
    for _ in range(3):
        run.driver.loop.iterate()
        run.journaled.flush()
    assert len(run.journal.entries[1].tokens) == 3
    options = OptionalParams(
        journal_path=run.journal.folder.path, restore_cb=lambda request_id: Delivered(has)
    )
    if option is not None:
        setattr(options, option, True)
    accepted = AcceptedRequests(run.journal.folder, 0, syncs=False)
    (progress,) = resume(run.journal, accepted, options).progress
    assert (progress.num_sent, len(progress.tokens)) == (has, kept)
    run.journal.close()


def test_stop_words_that_were_begun_before_the_death_are_found(tmp_path):
    prompt = [1, 2, 3]
    whole = expected_output(prompt, 12)
    words = np.array([[[*whole[4:7]], [3, -1, -1]]])
    folder = tmp_path / "journal"
    asked = request(1, prompt, 12, is_streaming=True, stop_words_list=words)
    first = JournaledRun(folder, [asked])
    start = first.size()
    first.run()
    for size in range(start, first.size() + 1, 23):
        has = [life for life in first.host.got if life[0] <= size]
        second = JournaledRun(die_at(folder, size), [asked] if size < first.size() else [])
        second.run()
        found = outputs_of(has, second.host.got)[1]
        assert found.tokens == whole[:4]
        assert found.num_finals == 1


def test_a_segment_that_is_full_is_replaced(tmp_path):
    folder = Path(tmp_path) / "journal"
    asked = [request(number, [1, 2, number], 40, is_streaming=True) for number in range(3)]
    run = JournaledRun(folder, asked, segment_bytes=600)
    run.run()
    assert run.segment().name > "segment-00000003"
    assert run.segment().stat().st_size < 2500
    found = outputs_of(run.host.got)
    assert all(found[n].tokens == expected_output([1, 2, n], 40) for n in range(3))


def test_the_adapter_of_a_request_is_stored_once(tmp_path):
    weights = np.ones((1, 64), dtype=np.float32)
    folder = tmp_path / "journal"
    run = JournaledRun(folder, [])
    pack = run.journaled._accepted.pack
    with_weights = [
        request(n, [1], 4, lora_task_id=5, lora_weights=weights, lora_config=np.array([[0, 0, 1]]))
        for n in range(2)
    ]
    packed = [pack(it, 0.0) for it in (*with_weights, request(3, [1], 4, lora_task_id=5))]
    assert len([*(folder / "objects").iterdir()]) == 1
    assert max(map(len, packed)) < 600
    restored = [run.journaled._accepted.restore(run.journaled._accepted.read(it)) for it in packed]
    assert all((it.lora_weights == weights).all() for it in restored)
    run.journaled._accepted.forget_tasks([5])
    run.journaled._accepted.end([0, 1, 3])
    assert not [*(folder / "objects").iterdir()]
    run.journal.close()


def test_an_adapter_is_read_again_only_if_it_may_have_changed(tmp_path, monkeypatch):
    run = JournaledRun(tmp_path / "journal", [])
    put, stored = run.journal.folder.put, []
    monkeypatch.setattr(
        run.journal.folder, "put", lambda data, **more: stored.append(data) or put(data, **more)
    )
    weights, config = torch.ones(1, 64), [(0, 0, 1)]

    def pack(number, tensor):
        more = {"lora_task_id": 5, "lora_weights": tensor, "lora_config": config}
        asked = InferenceRequest(number, {"input_ids": [1], "request_output_len": 1, **more})
        return run.journaled._accepted.pack(asked, 0.0)

    assert pack(1, weights) and pack(2, weights)
    assert len(stored) == 1
    weights += 1
    assert b"adapter" in pack(3, weights) and len(stored) == 2
    array = np.ones((1, 64), dtype=np.float32)
    assert pack(4, array) and pack(5, array)
    assert len(stored) == 4
    run.journal.close()


def pack_for_task(accepted, number, value=None):
    """A request of task 5 as bytes. Its weights are all `value`; None: it has only the id."""
    more = {}
    if value is not None:
        more["lora_weights"] = np.full((1, 64), value, dtype=np.float32)
        more["lora_config"] = np.array([[0, 0, 1]])
    return accepted.pack(request(number, [1], 4, lora_task_id=5, **more), 0.0)


def test_a_refused_adapter_does_not_become_that_of_its_task(tmp_path):
    """The manager keeps the adapter that it has, or is going to read, and refuses another one."""
    run = JournaledRun(tmp_path / "journal", [])
    accepted, cached = run.journaled._accepted, set()
    accepted.is_cached = cached.__contains__

    def digest(data):
        return accepted.read(data).objects["adapter"]

    both = pack_for_task(accepted, 1, 1.0), pack_for_task(accepted, 2, 2.0)
    first, other = map(digest, both)
    assert other != first
    assert digest(pack_for_task(accepted, 3)) == first
    later = AcceptedRequests(run.journal.folder, 0, syncs=False)  # after a death
    for data in both:
        later.restore(later.read(data))
    assert digest(pack_for_task(later, 3)) == first
    accepted.end([2])
    assert [it.name for it in (tmp_path / "journal" / "objects").iterdir()] == [first]
    accepted.end([1, 3])
    cached.add(5)  # but no request has it
    assert digest(pack_for_task(accepted, 4, 2.0)) == other
    assert digest(pack_for_task(accepted, 5)) == first
    accepted.end([4, 5])
    cached.clear()  # it was evicted
    assert digest(pack_for_task(accepted, 6, 2.0)) == other
    assert digest(pack_for_task(accepted, 7)) == other
    run.journal.close()


@pytest.mark.parametrize("why", ["too large", "a full disk"])
def test_the_adapter_of_a_request_that_is_not_written_is_not_in_use(tmp_path, monkeypatch, why):
    run = JournaledRun(tmp_path / "journal", [], on_full="refuse")
    if why == "too large":
        monkeypatch.setattr("gptmanager.journal.accepted.MAX_RECORD_BYTES", 8)
    else:
        monkeypatch.setattr(run.journal, "_append", lambda data: False)
    weights = {"lora_weights": np.ones((1, 64), np.float32), "lora_config": np.array([[0, 0, 1]])}
    run.journaled._accept([request(1, [1], 4, lora_task_id=5, **weights)])
    assert [failure.request_id for failure in run.host.failures] == [1]
    run.journaled._accepted.forget_tasks([5])
    run.journaled._accepted.remove_unused()
    assert not [*(tmp_path / "journal" / "objects").iterdir()]
    run.journal.close()


def test_each_request_continues_with_its_adapter_if_that_was_forgotten(tmp_path):
    run = JournaledRun(tmp_path / "journal", [])
    accepted, found = run.journaled._accepted, {}
    found[1], found[2] = pack_for_task(accepted, 1, 1.0), pack_for_task(accepted, 2)
    accepted.forget_tasks([5])
    found[3] = pack_for_task(accepted, 3, 2.0)
    for _ in range(2):  # in the manager that has packed them, and in one that has restored them
        accepted.forget_tasks([5, 6])
        pack_for_task(accepted, 4, 3.0)
        found[5] = pack_for_task(accepted, 5)
        accepted = AcceptedRequests(run.journal.folder, 0, syncs=False)
        renews, weights = [], []
        for data in found.values():
            read = accepted.read(data)
            renews.append(accepted.renews_adapter(read))
            weights.append(accepted.restore(read).lora_weights[0, 0].item())
        assert renews == [False, False, True, True]
        assert weights == [1.0, 1.0, 2.0, 3.0]
    run.journal.close()


def test_a_python_post_processor_comes_back_from_the_host_or_ends_its_request(tmp_path):
    def processor(request_id, logits, tokens, stream, client_id):
        pass

    folder = tmp_path / "journal"
    asked = request(1, [1, 2], 6, is_streaming=True, logits_post_processor=processor, client_id=7)
    first = JournaledRun(folder, [asked])
    start = first.size()
    first.run()
    size = next(life[0] for life in first.host.got[2:])
    assert size > start
    asks = []

    def restore(*arguments):
        asks.append(arguments)
        return processor

    second = JournaledRun(die_at(folder, size), [], restore_processor=restore)
    assert asks == [(1, 7)]
    assert second.resumption.requests[0].logits_post_processor is processor
    second.journal.close()
    third = JournaledRun(die_at(folder, size), [])
    third.run()
    [(_, _, _, is_final, error)] = third.host.got
    assert is_final
    assert error.startswith("JournalError: the request cannot be resumed")


@pytest.mark.parametrize(("num_parts", "resumes"), [(1, True), (2, False)])
def test_a_post_processor_that_other_ranks_must_call_ends_only_its_request(
    tmp_path, num_parts, resumes
):
    def processor(request_id, logits, tokens, stream, client_id):
        pass

    asked = [request(1, [1, 2], 6, logits_post_processor=processor), request(2, [3], 6)]
    run = JournaledRun(tmp_path / "journal", asked)
    run.driver.loop.iterate()
    options = OptionalParams(
        journal_path=run.journal.folder.path,
        restore_processor_cb=lambda request_id, client_id: processor,
        parallel_config=ParallelConfig(num_parts, replicate_logits_post_processors=True),
    )
    accepted = AcceptedRequests(run.journal.folder, 0, syncs=False)
    found = resume(run.journal, accepted, options)
    assert [it.request_id for it in found.requests] == ([1, 2] if resumes else [2])
    errors = [error for *_, error in found.responses]
    assert all("must be called on other ranks, too" in error for error in errors)
    run.journal.close()


def test_a_request_that_kills_each_manager_ends_and_one_that_makes_progress_goes_on(tmp_path):
    """Each life dies before anything is sent, but the third one sends a token of request 2."""
    folder, asked = tmp_path / "life", [request(n, [n], 9, is_streaming=True) for n in (1, 2, 3)]
    life = JournaledRun(folder, asked)
    life.journaled.fetch(None, 0)
    for number in range(1, 5):
        life.journal.close()
        folder = die_at(folder, life.size())
        life = JournaledRun(folder, [], max_resumes=3, max_batch_size=2)
        entries = life.journal.entries
        assert 1 not in entries or entries[1].num_starts == number < 4
        assert entries[2].num_starts == (1 if number == 4 else number)
        assert entries[3].num_starts == (number == 4)
        if number == 3:
            sent = Sent()
            sent.add(2, entries[2], expected_output([2], 9)[:1], [])
            life.journal.commit(sent)
    life.run()
    ids = torch.tensor([[expected_output([2], 9)[:1]]])  # sent by the third life
    found = outputs_of([(0, 2, [("output_ids", ids)], False, "")], life.host.got)
    assert len(found[1].errors) == 1 and found[1].num_finals == 1
    assert "3 managers have resumed it and none has sent a token of it" in found[1].errors[0]
    assert found[2].tokens == expected_output([2], 9)
    assert found[3].tokens == expected_output([3], 9) and not found[3].errors


def test_the_columns_of_sent_tokens_are_checked_when_they_are_read():
    entries = Entries({number: Entry(b"") for number in (1, 2, 2**64 - 1)})
    sent = Sent()
    sent.add(1, entries[1], [7], [])
    sent.add(2, entries[2], [3, -4], [])
    sent.add(2**64 - 1, entries[2**64 - 1], [5, 6], [-0.5, -1.0])
    whole = sent.payload()
    read = Entries({number: Entry(b"") for number in entries})
    read.apply(Kind.SENT, whole)
    assert {n: (it.tokens, it.log_probs) for n, it in read.items()} == {
        n: (it.tokens, it.log_probs) for n, it in entries.items()
    }
    with pytest.raises(JournalError, match="has sent 1 tokens, the record continues at 0"):
        read.apply(Kind.SENT, whole)
    wrong = [whole[:end] for end in range(len(whole))] + [whole + b"1234"]
    wrong += [struct.pack("<I", 2**32 - 1) + whole[4:], struct.pack("<I", 0) + whole[4:]]
    for payload in wrong:
        with pytest.raises(JournalError):
            Entries({number: Entry(b"") for number in entries}).apply(Kind.SENT, payload)
    with pytest.raises(JournalError, match="request 2 is not in the journal"):
        Entries({1: Entry(b"")}).apply(Kind.SENT, whole)


def test_an_answer_of_restore_cb_that_makes_no_sense_is_refused(tmp_path):
    folder = tmp_path / "journal"
    first = JournaledRun(folder, [request(1, [1, 2], 6, is_streaming=True)], record={})
    first.journaled.fetch(None, 0)
    first.journal.close()
    for answer in ("x", True, Delivered(-1), Delivered(1.0), Delivered(0, "no")):
        copy = die_at(folder, first.size())
        with pytest.raises(CallbackError, match="restore_cb returned .*, expected None, or a"):
            JournaledRun(copy, [], record={1: answer})
        assert JournalFolder(copy).read().entries[1].num_starts == 0
    life = JournaledRun(folder, [], record={1: Delivered(7)})
    life.run()
    [(_, _, _, is_final, error)] = life.host.got
    assert is_final and "the host has 7 tokens of the request, which may have at most 6" in error
