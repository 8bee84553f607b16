"""What the documents show runs, and what they list is what the code holds."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

from gptmanager.api import PROPERTY_OF_TENSOR
from gptmanager.cuda import emulator
from gptmanager.errors import ConfigError
from gptmanager.life import NEXT_MANAGER_STATES
from gptmanager.loop import TokenLoop
from gptmanager.request import NEXT_STATES, LlmRequestState
from gptmanager.testing import RULES

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
# Elsewhere an example may be pasted alone.
PAGES_READ_IN_ORDER = ("recording.md", "scheduling.md")
PAGES_ON_THE_EMULATOR = ("devices.md", "emulator.md", "logits_processors.md")


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def skip_without_emulator():
    try:
        emulator.Toolchain().require_headers()
    except ConfigError as error:
        pytest.skip(str(error))


def table_names(text):
    """The first cell of every row of every table, split at commas."""
    cells = re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)
    return [name for cell in cells for name in cell.split(", ")]


def test_the_diagram_of_the_loop_has_the_words_and_the_order_of_iterate():
    """`iterate` calls the phases, `finish` the three that come of a result."""
    diagram = page("loop.md").split("```")[1]
    words = [
        word
        for word in re.findall(r"\b[a-z_]+\b", diagram)
        if callable(getattr(TokenLoop, word, None))
    ]
    tree = ast.parse((ROOT / "gptmanager" / "loop.py").read_text(encoding="utf-8"))
    methods = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}

    def calls(name):
        """Own methods that a method calls, in the order in which they run."""
        found = []
        for node in ast.walk(methods[name]):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                if isinstance(node.func.value, ast.Name) and node.func.value.id == "self":
                    found.append((node.end_lineno, node.end_col_offset, node.func.attr))
        return [attribute for *_, attribute in sorted(found)]

    order = []
    for call in calls("iterate"):
        order += calls("finish") if call == "finish" else [call]
    assert words == order


def test_the_loop_is_about_25_lines():
    tree = ast.parse((ROOT / "gptmanager" / "loop.py").read_text(encoding="utf-8"))
    (iterate,) = (n for n in ast.walk(tree) if getattr(n, "name", None) == "iterate")
    assert iterate.end_lineno - iterate.lineno <= 27


def test_the_state_tables_are_those_of_the_code():
    rows = re.findall(r"^\| ([A-Z_]+) \|(?:[^|]*\|)? ([^|]*) \|$", page("loop.md"), re.MULTILINE)
    documented = {name: set(re.findall(r"[A-Z_]{5,}", successors)) for name, successors in rows}
    for table in (NEXT_STATES, NEXT_MANAGER_STATES):
        for state, successors in table.items():
            if state not in (LlmRequestState.UNKNOWN, LlmRequestState.ENCODER_INIT):
                assert documented[state.name] == {successor.name for successor in successors}


def test_the_table_of_tensors_is_complete():
    section = page("requests.md").split("## Tensors")[1].split("##")[0]
    assert set(table_names(section)) - {"name", "---"} == set(PROPERTY_OF_TENSOR)


def test_the_statistics_tables_are_those_of_the_schema():
    schema = json.loads((ROOT / "gptmanager" / "statistics.schema.json").read_text())
    flat = schema["properties"]
    names = set(flat) - {"gptmanager"} | set(flat["gptmanager"]["properties"])
    assert set(table_names(page("statistics.md"))) - {"key", "---"} == names


def test_the_rules_of_schedulers_are_those_of_the_kit():
    rows = re.findall(r"^\| ([a-z-]+) \| (.*) \|$", page("testing.md"), flags=re.MULTILINE)
    assert dict(rows[2:]) == RULES  # behind the head of the table


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_python_examples_run(path, monkeypatch):
    monkeypatch.chdir(ROOT)
    if path.name in PAGES_ON_THE_EMULATOR:
        skip_without_emulator()
    namespace: dict[str, object] = {}
    for block in examples(path):
        if path.name not in PAGES_READ_IN_ORDER:
            namespace = {}
        exec(compile(block, str(path), "exec"), namespace)


def test_the_emulator_says_what_its_page_quotes():
    skip_without_emulator()
    wrong = examples(ROOT / "docs" / "emulator.md")[0].replace("    __syncthreads();\n", "")
    with pytest.raises(emulator.EmulatorError) as caught:
        exec(wrong, {})
    quoted = re.findall(r"^> (.*)$", page("emulator.md"), re.MULTILINE)
    assert str(caught.value) == " ".join(quoted)


def test_the_report_that_the_page_of_processors_quotes(capsys):
    skip_without_emulator()
    (block,) = (it for it in examples(ROOT / "docs" / "logits_processors.md") if "run(token" in it)
    exec(block, {})
    quoted = block.rsplit("# ", 1)[1].rstrip(". \n")
    assert capsys.readouterr().out.startswith(quoted)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target
