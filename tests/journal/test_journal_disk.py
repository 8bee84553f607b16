"""A disk that is full, slow or damaged: what a journal refuses, continues, forces out and finds."""

import errno
import io
import logging
import os
import shutil
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from journaled_runs import JournaledRun, die_at
from loop_driver import expected_output, next_token
from pausing import PausingHost
from shorthand import request
from shorthand import start as start_manager

from gptmanager.errors import ConfigError, JournalError
from gptmanager.journal import journal as journal_module
from gptmanager.journal import records, segments
from gptmanager.journal.journal import SyncThread
from gptmanager.journal.segments import JournalFolder
from gptmanager.lifecycle.state import ManagerState
from gptmanager.testing import RecordingCallbacks

RESERVE = segments._RESERVE_BYTES


class SmallDisk:
    """Accounts for what is written: a write that does not fit writes a part, then raises."""

    def __init__(self, monkeypatch):
        self.free = 1 << 30
        self.reserve = 0
        self._whole = segments.write_all
        monkeypatch.setattr(segments, "write_all", self.write)
        monkeypatch.setattr(journal_module, "write_all", self.write)
        monkeypatch.setattr(JournalFolder, "take_reserve", lambda folder: self.take())
        monkeypatch.setattr(JournalFolder, "free_reserve", lambda folder: self.give())
        monkeypatch.setattr(journal_module, "_RETRY_S", 0.0)

    def write(self, file, data):
        fits = min(len(data), self.free)
        self._whole(file, data[:fits])
        self.free -= fits
        if fits < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def take(self):
        if self.free + self.reserve < RESERVE:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.free, self.reserve = self.free + self.reserve - RESERVE, RESERVE

    def give(self):
        self.free, self.reserve = self.free + self.reserve, 0


@pytest.fixture
def disk(monkeypatch):
    return SmallDisk(monkeypatch)


def stream(number, length=12, **more):
    return request(number, [1, 2, number], length, is_streaming=True, **more)


def iterate(run, count):
    for _ in range(count):
        run.driver.loop.iterate()
        run.journaled.flush()


def ends(run):
    return {life[1]: life[4] for life in run.host.got if life[3]}


def streamed(run, number):
    found = [dict(life[2]) for life in run.host.got if life[1] == number and not life[4]]
    return [token for it in found for token in it["output_ids"].flatten().tolist()]


@pytest.mark.parametrize("free", [0, 2, 40, RESERVE // 2])
def test_a_new_journal_that_does_not_fit_is_named_and_unlocked(tmp_path, disk, free):
    disk.free = free
    for _ in range(2):
        with pytest.raises(
            JournalError, match=f"cannot write .*{tmp_path}/journal.*: No space left"
        ):
            JournaledRun(tmp_path / "journal", [], on_full="refuse")


def test_a_record_may_have_the_largest_size(monkeypatch):
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 8)
    data = records.record(records.Kind.FINAL, b"12345678")
    assert [it.payload for it in records.RecordReader(io.BytesIO(data), len(data), "")] == [
        b"12345678"
    ]
    with pytest.raises(JournalError, match="a record of 9 bytes is too large"):
        records.record(records.Kind.FINAL, b"123456789")
    monkeypatch.setattr(records, "MAX_RECORD_BYTES", 7)
    with pytest.raises(JournalError, match="its length is 8: the limit is 7"):
        list(records.RecordReader(io.BytesIO(data), len(data), ""))


def test_the_reserve_has_4_mib_on_the_disk(tmp_path, monkeypatch):
    """If there is less, it takes nothing."""
    folder = JournalFolder(tmp_path)
    folder.take_reserve()
    assert (tmp_path / "reserve").stat().st_blocks * 512 >= 4 << 20
    folder.free_reserve()
    folder.free_reserve()
    assert not [*tmp_path.iterdir()]

    def allocate_a_part(file, offset, length):
        os.write(file, bytes(4096))
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", allocate_a_part, raising=False)
    with pytest.raises(OSError, match="No space left"):
        folder.take_reserve()
    assert not [*tmp_path.iterdir()]


def test_while_the_disk_is_full_requests_are_refused_and_the_running_ones_end(tmp_path, disk):
    run = JournaledRun(tmp_path / "journal", [stream(1)], on_full="refuse")
    iterate(run, 3)
    disk.free = 5  # a record is cut short, then the reserve is used
    run.host.callbacks.submit(stream(2))
    iterate(run, 20)
    assert ends(run)[1] == "" and ends(run)[2].startswith(
        "CapacityError: the journal cannot be written"
    )
    assert streamed(run, 1) == expected_output([1, 2, 1], 12) and streamed(run, 2) == []
    disk.free += 1 << 30
    run.host.callbacks.submit(stream(3))
    iterate(run, 4)
    assert disk.reserve == RESERVE
    sent = len(streamed(run, 3))
    found = JournaledRun(die_at(tmp_path / "journal", run.size()), [], on_full="refuse")
    assert [*found.journal.entries] == [3] and len(found.journal.entries[3].tokens) == sent > 1
    found.journal.close()
    run.journal.close()


def test_if_the_reserve_is_full_too_the_manager_fails_and_says_so(tmp_path, disk):
    run = JournaledRun(tmp_path / "journal", [stream(1)], on_full="refuse")
    iterate(run, 3)
    disk.free = disk.reserve = 0
    with pytest.raises(JournalError, match="not even in place of its reserve: free space"):
        iterate(run, 1)
    run.journaled.flush()  # what was held back is sent all the same
    assert len(streamed(run, 1)) == 4
    run.journal.close()


@pytest.mark.parametrize("ends", ["a step fails", "shutdown"])
def test_a_disk_that_is_full_at_the_end_of_the_loop_keeps_back_no_response(tmp_path, disk, ends):
    def script(history):
        if len(history) > 8 and ends == "a step fails":
            disk.free = disk.reserve = 0
            raise LookupError("a step")
        return next_token(history)

    host = PausingHost(lambda of_all, *_: of_all == 1 and ends == "shutdown")
    options = {"journal_path": tmp_path / "journal", "journal_sync": "never"}
    manager = start_manager(
        host, script, max_step_failures=1, black_box_iterations=0, idle_poll_s=0.001, **options
    )
    host.submit(stream(1, 90), stream(2, 90))
    if ends == "shutdown":
        while not host.responses:
            time.sleep(0.001)
        disk.free = disk.reserve = 0
        manager.shutdown(drain=False)
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    finals = {it.request_id: it.error for it in host.responses if it.is_final}
    text = "the manager was shut down" if ends == "shutdown" else "LookupError: a step"
    assert sorted(finals) == [1, 2] and all(text in error for error in finals.values())


def test_responses_of_a_step_that_a_call_finishes_do_not_wait_for_the_next_iteration(tmp_path):
    host = PausingHost(lambda of_all, *_: of_all == 1)
    with start_manager(host, run_ahead=1, journal_path=tmp_path / "journal") as manager:
        host.submit(stream(1, 2))
        while not host.responses:
            time.sleep(0.001)
        manager.sleep()
        assert [(it.is_final, it.error) for it in host.responses] == [(False, ""), (True, "")]
        manager.wake()


def test_a_journal_that_cannot_be_closed_does_not_keep_a_manager_from_its_end(
    tmp_path, monkeypatch, caplog
):
    def fail(folder, lock):
        lock.close()
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(JournalFolder, "unlock", fail)
    manager = start_manager(RecordingCallbacks(), journal_path=tmp_path / "journal")
    manager.shutdown(timeout=10)
    assert manager.wait(0) and manager.state is ManagerState.STOPPED
    assert "an error while the loop was released" in caplog.text


def test_an_error_whose_text_utf_8_cannot_encode_ends_only_its_request(tmp_path, caplog):
    caplog.set_level(logging.CRITICAL, "gptmanager")  # the report of a test is sent in UTF-8

    def processor(request_id, logits, tokens, stream, client_id):
        raise LookupError("\udcff")

    host, folder = RecordingCallbacks(), tmp_path / "journal"
    options = {"journal_path": folder, "journal_sync": "never", "restore_cb": lambda number: None}
    with start_manager(host, **options):
        host.submit(stream(1), stream(2, logits_post_processor=processor))
        assert host.final(1).error == ""
        assert host.final(2).error.endswith("raised LookupError: \\udcff")
    assert JournalFolder(folder).read().entries == {}


def test_a_response_that_cannot_be_recorded_ends_the_manager_and_not_the_journal(tmp_path):
    class Unreadable(dict):
        def get(self, request_id, default=None):
            raise LookupError("a fault of the program")

    host = RecordingCallbacks()
    manager = start_manager(host, journal_path=tmp_path / "journal", black_box_iterations=0)
    manager._host.journal._journal.entries = Unreadable()
    host.submit(stream(1))
    assert manager.wait(30) and manager.state is ManagerState.FAILED
    text = "JournalError: responses cannot be recorded: LookupError: a fault of the program"
    assert host.final(1).error == text


def test_ends_that_cannot_be_recorded_prevent_no_response(tmp_path, monkeypatch, caplog):
    run = JournaledRun(tmp_path / "journal", [stream(1)])
    iterate(run, 2)

    def fail(*ignored):
        raise LookupError("a fault of the program")

    monkeypatch.setattr(run.journal, "commit", fail)
    run.journaled.note_ends([1], "an error")
    assert "not in the journal: LookupError: a fault of the program" in caplog.text
    run.journal.close()


def test_after_another_thread_has_answered_the_loop_writes_nothing(tmp_path):
    class Abandoned(BaseException):
        pass

    def check():
        if is_abandoned.is_set():
            raise Abandoned

    is_abandoned = threading.Event()
    run = JournaledRun(tmp_path / "journal", [stream(1)], check=check)
    iterate(run, 2)
    is_abandoned.set()
    run.journaled.note_ends([1], "an error")
    size, first = run.size(), len(run.host.got)
    with pytest.raises(Abandoned):  # a response that the loop held back
        run.driver.loop.iterate()
    run.host.callbacks.submit(stream(2))
    with pytest.raises(Abandoned):  # a request that is answered as lost
        run.journaled.fetch(1, 0)
    assert (run.size(), len(run.host.got)) == (size, first)
    run.journal.close()


def test_on_a_full_disk_requests_may_continue_without_a_journal(tmp_path, disk):
    run = JournaledRun(tmp_path / "journal", [stream(1)], on_full="continue")
    iterate(run, 3)
    disk.free = 5
    run.host.callbacks.submit(stream(2, 30))
    iterate(run, 20)
    assert ends(run) == {1: ""} and streamed(run, 1) == expected_output([1, 2, 1], 12)
    disk.free = 1 << 30
    iterate(run, 1)
    sent = len(streamed(run, 2))
    found = JournaledRun(die_at(tmp_path / "journal", run.size()), [])
    assert [*found.journal.entries] == [2] and len(found.journal.entries[2].tokens) == sent > 9
    found.journal.close()
    run.journal.close()


def test_a_disk_with_space_again_loses_no_request_that_comes_then(tmp_path, disk, monkeypatch):
    run = JournaledRun(tmp_path / "journal", [stream(1)], on_full="continue")
    iterate(run, 2)
    disk.free = 0
    iterate(run, 1)
    begin, tries = run.journal._begin_segment, []

    def second():  # the disk has space between two tries
        tries.append(1)
        disk.free = 0 if len(tries) == 1 else 1 << 30
        begin()

    monkeypatch.setattr(run.journal, "_begin_segment", second)
    run.journal.accept([(2, b"a request")])
    run.journal.accept([(3, b"another")])
    assert len(tries) == 2
    assert [*JournalFolder(tmp_path / "journal").read().entries] == [1, 2, 3]
    run.journal.close()


@pytest.mark.parametrize("failing", ["_sync_names", "unlink"])
def test_a_new_segment_that_fails_late_loses_no_record(tmp_path, monkeypatch, failing):
    run = JournaledRun(tmp_path / "journal", [stream(1)], sync="always")
    iterate(run, 2)

    def fail(*given):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(segments if failing == "_sync_names" else type(tmp_path), failing, fail)
        run.journal._rotate()
    run.journal.accept([(2, b"after the failure")])
    assert [*JournalFolder(tmp_path / "journal").read().entries] == [1, 2]
    run.journal._rotate()
    assert len(list((tmp_path / "journal").glob("segment-*"))) == 1
    assert [*JournalFolder(tmp_path / "journal").read().entries] == [1, 2]
    run.journal.close()


@pytest.mark.parametrize("on_full", ["refuse", "continue"])
def test_an_adapter_that_does_not_fit_is_not_half_stored(tmp_path, disk, on_full):
    run = JournaledRun(tmp_path / "journal", [], on_full=on_full)
    disk.free = 20
    weights = {"lora_task_id": 5, "lora_weights": np.ones((1, 64), dtype=np.float32)}
    run.journaled._accept([stream(1, **weights, lora_config=np.array([[0, 0, 1]]))])
    assert not [*(tmp_path / "journal" / "objects").iterdir()]
    assert run.journal.is_full and not run.journal.entries
    errors = [str(failure.error) for failure in run.host.failures]
    text = "the journal cannot be written, as on a full disk (journal_on_full = 'refuse')"
    assert errors == [text] * (on_full == "refuse")
    run.journal.close()


@pytest.mark.parametrize("on_full", ["refuse", "continue"])
def test_an_adapter_without_a_file_is_as_on_a_full_disk(tmp_path, disk, monkeypatch, on_full):
    run = JournaledRun(tmp_path / "journal", [], on_full=on_full)
    real = os.open

    def open_(path, *more):
        if "objects" in str(path):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return real(path, *more)

    monkeypatch.setattr(segments.os, "open", open_)
    weights = {"lora_task_id": 5, "lora_weights": np.ones((1, 64), dtype=np.float32)}
    run.journaled._accept([stream(1, **weights, lora_config=np.array([[0, 0, 1]]))])
    assert run.journal.is_full and not run.journal.entries
    errors = [str(failure.error) for failure in run.host.failures]
    assert len(errors) == (on_full == "refuse") and all("on a full disk" in it for it in errors)
    run.journal.close()


def test_always_forces_the_records_out_before_their_responses_are_sent(tmp_path, monkeypatch):
    run = JournaledRun(tmp_path / "journal", [stream(1), stream(2, 3)], sync="always")
    synced, real = [0], os.fdatasync

    def sync(file):
        real(file)
        synced.append(os.fstat(file).st_size)

    monkeypatch.setattr(journal_module.os, "fdatasync", sync)
    sizes = []
    run.host.size = lambda: sizes.append((run.size(), synced[-1]))
    run.run()
    assert len(sizes) == 15 and all(size == forced for size, forced in sizes)


def test_never_forces_nothing(tmp_path, monkeypatch):
    def fail(file):
        raise AssertionError

    monkeypatch.setattr(journal_module.os, "fdatasync", fail)
    monkeypatch.setattr(segments.os, "fsync", fail)
    run = JournaledRun(tmp_path / "journal", [stream(1)], sync="never")
    run.run()
    assert ends(run) == {1: ""}


def test_what_a_failed_sync_may_have_lost_is_written_again(tmp_path, monkeypatch):
    began = threading.Event()
    monkeypatch.setattr(SyncThread, "_run", lambda thread: began.set())  # it syncs nothing
    run = JournaledRun(tmp_path / "journal", [stream(1)], sync=20, on_full="refuse")
    iterate(run, 3)
    before = run.segment()
    run.journal._syncing.error = OSError(errno.ENOSPC, "No space left on device")
    iterate(run, 1)
    assert run.journal._syncing.error is None and run.segment() != before
    iterate(run, 20)
    assert ends(run) == {1: ""}
    run.journal.close()
    assert not JournalFolder(tmp_path / "journal").read().entries


def test_a_sync_thread_forces_what_was_noted_and_reports_errors(tmp_path, monkeypatch):
    called = threading.Event()

    def fail(file):
        called.set()
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(journal_module.os, "fdatasync", fail)
    thread = SyncThread(0.001)
    with (tmp_path / "file").open("wb") as file:
        thread.note(file.fileno())
        assert called.wait(30)
        thread.stop()
    assert thread.error is not None and thread.error.errno == errno.EIO


def test_an_id_that_ends_twice_ends_once_in_the_journal(tmp_path):
    run = JournaledRun(tmp_path / "journal", [stream(1)], record={})
    iterate(run, 2)
    run.journaled.note_ends([1, 1], "StepError: twice")
    assert JournalFolder(tmp_path / "journal").read().entries[1].last
    run.journaled._write_delivered()
    assert not JournalFolder(tmp_path / "journal").read().entries
    run.journal.close()


def test_a_refused_copy_of_a_request_does_not_end_it(tmp_path):
    run = JournaledRun(tmp_path / "journal", [stream(1)])
    iterate(run, 2)
    run.journaled._accept([stream(1)])  # an iteration that fails then: its error goes to the copy
    run.journaled.note_ends([1], "StepError: no")
    assert [*run.journal.entries] == [1]
    run.journaled.note_ends([1], "StepError: no")
    assert not run.journal.entries
    run.journal.close()


def test_a_changed_byte_is_found_wherever_it_is(tmp_path):
    run = JournaledRun(tmp_path / "journal", [stream(1, 3), request(2, [7], 2)])
    iterate(run, 3)
    folder, path = JournalFolder(tmp_path / "journal"), run.segment()
    whole = path.read_bytes()
    last = len(whole) - 1
    for offset in range(0, len(whole), 13):
        damaged = bytearray(whole)
        damaged[offset] ^= 0x41
        path.write_bytes(damaged)
        try:
            found = folder.read()
        except JournalError as error:
            assert "record at offset" in str(error)
        else:
            assert found.torn and found.end + found.torn == last + 1
    for length in range(0, len(whole), 3):
        path.write_bytes(whole[:length])
        try:
            found = folder.read()
        except JournalError as error:
            assert "offset 0" in str(error)  # nothing of it was written
        else:
            assert found.end + found.torn == length
    run.journal.close()


def test_files_that_cannot_be_removed_fail_no_request(tmp_path, monkeypatch):
    """A file system may have become read-only, or an operator may have removed the folder."""
    run = JournaledRun(tmp_path / "journal", [request(1, [1], 20)], on_full="refuse")
    iterate(run, 2)
    run.journal.folder.put(b"an object", syncs=False)

    def refuse(*ignored, **more):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", refuse)
        patch.setattr(journal_module, "write_all", refuse)
        run.journaled._accepted.remove_unused()
        run.host.callbacks.submit(stream(2))
        iterate(run, 2)
    shutil.rmtree(tmp_path / "journal" / "objects")
    run.journaled._accepted.remove_unused()
    assert [*ends(run)] == [2] and ends(run)[2].startswith("CapacityError: the journal cannot be")
    run.journal.close()


def test_a_forked_process_does_not_keep_the_lock(tmp_path):
    run = JournaledRun(tmp_path / "journal", [])
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes its end
        os._exit(0)
    os.close(reading)
    run.journal.close()
    JournaledRun(tmp_path / "journal", []).journal.close()
    os.close(writing)
    os.waitpid(child, 0)


def test_the_owner_of_a_locked_journal_is_named_and_missing_locks_are_not_blamed_on_others(
    tmp_path, monkeypatch
):
    folder = segments.JournalFolder(tmp_path)
    with folder.lock(), pytest.raises(ConfigError, match=f"of process '{os.getpid()}'$"):
        folder.lock()

    def no_locks(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(segments.fcntl, "flock", no_locks)
    with pytest.raises(JournalError, match="cannot lock the journal .*: No locks available"):
        folder.lock()
