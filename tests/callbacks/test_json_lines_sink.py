import json
import logging
import os
import threading

import pytest

from gptmanager.callbacks import JsonLinesSink

RECORD = json.dumps({"Iteration Counter": 1})  # 24 bytes with its line break


def lines(path):
    return path.read_text().splitlines()


def test_each_record_is_a_line_on_disk_at_once(tmp_path):
    path = tmp_path / "stats.jsonl"
    with JsonLinesSink(path) as sink:
        sink(RECORD)
        assert lines(path) == [RECORD]
        sink(json.dumps({"a": "é"}, indent=1, ensure_ascii=False))
        assert [json.loads(line) for line in lines(path)][1] == {"a": "é"}
    assert sink.num_dropped == 0


def test_a_second_run_appends(tmp_path):
    for _ in range(2):
        with JsonLinesSink(tmp_path / "stats.jsonl") as sink:
            sink(RECORD)

    assert lines(tmp_path / "stats.jsonl") == [RECORD, RECORD]


def test_a_line_that_a_crash_cut_short_does_not_spoil_the_next(tmp_path):
    path = tmp_path / "stats.jsonl"
    path.write_text(RECORD + "\n" + RECORD[:5])

    with JsonLinesSink(path) as sink:
        sink(RECORD)

    assert lines(path) == [RECORD, RECORD[:5], RECORD]


@pytest.mark.parametrize("way", ["move", "delete", "replace", "truncate"])
def test_a_file_that_another_program_takes_away_is_opened_anew(tmp_path, way):
    path, other = tmp_path / "stats.jsonl", tmp_path / "stats.jsonl-20261126"
    with JsonLinesSink(path, max_bytes=90) as sink:
        for _ in range(3):
            sink(RECORD)
        if way == "truncate":  # copytruncate of logrotate
            os.truncate(path, 0)
        elif way == "delete":
            path.unlink()
        else:
            path.rename(other)
        if way == "replace":  # create of logrotate
            path.write_text("")
        for _ in range(3):
            sink(RECORD)
    assert lines(path) == [RECORD] * 3 and sink.num_dropped == 0
    assert not (tmp_path / "stats.jsonl.1").exists()
    if way in ("move", "replace"):
        assert lines(other) == [RECORD] * 3


def test_a_folder_that_is_taken_away_drops_records_until_it_is_back(tmp_path):
    folder = tmp_path / "logs"
    folder.mkdir()
    with JsonLinesSink(folder / "stats.jsonl") as sink:
        folder.rename(tmp_path / "old")
        sink(RECORD)
        assert sink.num_dropped == 1
        folder.mkdir()
        sink(RECORD)
        assert lines(folder / "stats.jsonl") == [RECORD] and sink.num_dropped == 1


def test_files_are_rotated_by_size(tmp_path):
    path = tmp_path / "stats.jsonl"
    records = [json.dumps({"n": number}) for number in range(10, 17)]  # 10 bytes each

    with JsonLinesSink(path, max_bytes=25, backups=2) as sink:
        for record in records:
            sink(record + "")

    assert lines(path) == records[6:]
    assert lines(tmp_path / "stats.jsonl.1") == records[4:6]
    assert lines(tmp_path / "stats.jsonl.2") == records[2:4]
    assert sorted(os.listdir(tmp_path)) == ["stats.jsonl", "stats.jsonl.1", "stats.jsonl.2"]


def test_without_backups_old_records_are_deleted(tmp_path):
    path = tmp_path / "stats.jsonl"

    with JsonLinesSink(path, max_bytes=30, backups=0) as sink:
        for _ in range(3):
            sink(RECORD)

    assert lines(path) == [RECORD]
    assert os.listdir(tmp_path) == ["stats.jsonl"]


def test_a_record_over_the_limit_has_a_file_of_its_own(tmp_path):
    path = tmp_path / "stats.jsonl"

    with JsonLinesSink(path, max_bytes=5, backups=1) as sink:
        sink(RECORD)
        sink(RECORD)

    assert lines(path) == lines(tmp_path / "stats.jsonl.1") == [RECORD]


def test_a_record_that_cannot_be_written_is_counted_and_logged_once(tmp_path, caplog):
    # Given a sink whose rotation fails, because a folder has the name of the backup
    path = tmp_path / "stats.jsonl"
    (tmp_path / "stats.jsonl.1" / "in the way").mkdir(parents=True)
    with JsonLinesSink(path, max_bytes=30, backups=1) as sink:
        sink(RECORD)

        # When records are written
        with caplog.at_level(logging.WARNING):
            sink(RECORD)
            sink(RECORD)
        assert (sink.num_dropped, len(caplog.records)) == (2, 1)
        assert str(path) in caplog.text

        # Then the sink continues after the folder is removed
        (tmp_path / "stats.jsonl.1" / "in the way").rmdir()
        (tmp_path / "stats.jsonl.1").rmdir()
        sink(RECORD)
    assert lines(path) == lines(tmp_path / "stats.jsonl.1") == [RECORD]
    assert sink.num_dropped == 2


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_raises_nothing():
    with JsonLinesSink("/dev/full") as sink:
        sink(RECORD)

        assert sink.num_dropped == 1


def test_a_record_that_is_not_unicode_is_dropped(tmp_path):
    with JsonLinesSink(tmp_path / "stats.jsonl") as sink:
        sink('{"a": "\ud800"}')
        sink(RECORD)

    assert sink.num_dropped == 1
    assert lines(tmp_path / "stats.jsonl") == [RECORD]


def test_records_after_the_end_are_dropped(tmp_path):
    sink = JsonLinesSink(tmp_path / "stats.jsonl")
    sink.close()
    sink.close()

    sink(RECORD)

    assert sink.num_dropped == 1


def test_threads_do_not_mix_their_lines(tmp_path):
    with JsonLinesSink(tmp_path / "stats.jsonl", max_bytes=2000, backups=99) as sink:
        threads = [
            threading.Thread(target=lambda: [sink(RECORD) for _ in range(100)]) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)

    assert [line for path in tmp_path.iterdir() for line in lines(path)] == [RECORD] * 400


def test_impossible_arguments_are_refused(tmp_path):
    with pytest.raises(OSError):
        JsonLinesSink(tmp_path)
    with pytest.raises(ValueError, match="max_bytes"):
        JsonLinesSink(tmp_path / "a", max_bytes=0)
    with pytest.raises(ValueError, match="backups"):
        JsonLinesSink(tmp_path / "a", backups=-1)
