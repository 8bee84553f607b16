"""`gptmanager journal` names the state of each request by a word of docs/reliability.md."""

import json
import re
from pathlib import Path

import pytest
from journaled_runs import JournaledRun, die_at
from shorthand import request

from gptmanager import cli
from gptmanager.journal.main import report_of
from gptmanager.journal.segments import JournalFolder

RELIABILITY = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"


def test_a_request_passes_through_the_states_of_the_documentation(tmp_path, capsys):
    asked = [request(1, [1, 2], 3, is_streaming=True), request(2, [3], 3)]
    run = JournaledRun(tmp_path / "journal", asked, record={})
    start = run.size()
    run.run()
    seen = {1: [], 2: []}
    for size in (*range(start, run.size(), 16), run.size()):
        folder = JournalFolder(die_at(tmp_path / "journal", size))
        for one in report_of(folder, folder.read())["requests"]:
            states = seen[one["request_id"]]
            if one["state"] not in states:
                states.append(one["state"])
            if states == ["journaled", "sent", "final"]:
                ended = str(folder.path)
    assert seen == {1: ["journaled", "sent", "final"], 2: ["journaled", "final"]}
    table = RELIABILITY.read_text(encoding="utf-8").partition("## The states of a request")[2]
    listed = re.findall(r"^\| (\w+) \|", table.partition("\n## ")[0], re.MULTILINE)
    assert listed == ["state", "returned", *seen[1], "acknowledged"]

    assert cli.main(["journal", ended, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["requests"]
    assert next(one for one in told if one["request_id"] == 1)["state"] == "final"
    assert all(re.search(r"\d\d:\d\d:\d\d[+-]\d{4}$", one["accepted"]) for one in told)
    assert cli.main(["journal", ended]) == 0
    assert ", final but not acknowledged" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_a_folder_without_a_journal_is_a_wrong_call(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    assert cli.main(["journal", str(tmp_path / name)]) == 2
    assert capsys.readouterr().err == f"gptmanager: {tmp_path / name} has no journal\n"
