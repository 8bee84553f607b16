"""What the documents show runs, and what they list is what the code holds."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import math
import re
import shlex
import typing
from pathlib import Path

import pytest

from gptmanager import cli, config
from gptmanager.assembly.options import checked_optional_params, checked_scheduler_config
from gptmanager.cuda import emulator
from gptmanager.errors import ConfigError
from gptmanager.lifecycle.state import NEXT_MANAGER_STATES, Health
from gptmanager.loop.token_loop import TokenLoop
from gptmanager.manager import inspection
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.models import Batch, ModelSpec, load_model
from gptmanager.request.inference_request import TENSORS
from gptmanager.request.llm_request import NEXT_STATES, LlmRequestState
from gptmanager.scheduler import KvCacheManager, LlmRequest
from gptmanager.scheduler.wait_reasons import WaitReason
from gptmanager.simulator import CostModel, Machine, SyntheticLoad, hypothetical, simulate
from gptmanager.simulator.report import Comparison, figures_table, plain
from gptmanager.terminal.tables import lines
from gptmanager.testing import RULES

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
PAGES = sorted(
    [*(ROOT / name for name in TOP_PAGES), *(ROOT / "docs").glob("*.md")],
)
# Elsewhere an example may be pasted alone.
PAGES_READ_IN_ORDER = ("own_scheduler.md", "recording.md")
CONFIGURATIONS = [it for it in vars(config).values() if dataclasses.is_dataclass(it)]
CACHE_PAGE = "kv_cache_manager.md"
CONSTRUCTOR = ("manager.md", "## The constructor")
# what else must be set for a field to be taken
_TIER = {"enable_block_reuse": True, "host_cache_size": 1 << 30}
NEEDED = {
    "host_cache_size": {"enable_block_reuse": True},
    "state_snapshots": {"enable_block_reuse": True},
    "secondary_offload_min_priority": _TIER,
    "sink_token_length": {"max_attention_window": 2**31 - 1},
    "max_ngram": {"min_ngram": 1},
    "min_ngram": {"max_ngram": 2**31 - 1},
}
PAGES_ON_THE_EMULATOR = ("devices.md", "emulator.md", "logits_processors.md")


def page(name):
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def examples(path):
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


def skip_without_emulator():
    try:
        emulator.Toolchain().require_headers()
    except ConfigError as error:
        pytest.skip(f"needs the headers of CUDA: {error}")


def table_names(text):
    """The first cell of every row of every table, split at commas."""
    cells = re.findall(r"^\| ([^|]+) \|", text, flags=re.MULTILINE)
    return [name for cell in cells for name in cell.split(", ")]


def section(name, title):
    """What stands under a heading of a page, headings below it included."""
    level = title.split(" ")[0]
    text = page(name).split(f"\n{title}\n")[1]
    return re.split(rf"^#{{1,{len(level)}}} ", text, maxsplit=1, flags=re.MULTILINE)[0]


def rows(text):
    """The cells of every row of every table, their heads left out."""
    lines = re.findall(r"^\| (.*) \|$", text.replace("|  |", "| |"), re.MULTILINE)
    found = [[cell.strip() for cell in f" {line} ".split(" | ")] for line in lines]
    heads = [index - 1 for index, cells in enumerate(found) if set(cells[0]) <= set("-: ")]
    return [cells for index, cells in enumerate(found) if not {index, index - 1} & set(heads)]


def code(cell):
    return cell.strip().strip("`")


def test_the_diagram_of_the_loop_has_the_words_and_the_order_of_iterate():
    """`iterate` calls the phases, `finish` the three that come of a result."""
    diagram = page("loop.md").split("```")[1]
    words = [
        word
        for word in re.findall(r"\b[a-z_]+\b", diagram)
        if callable(getattr(TokenLoop, word, None))
    ]
    tree = ast.parse((ROOT / "gptmanager" / "loop" / "token_loop.py").read_text(encoding="utf-8"))
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


def test_the_phases_of_the_statistics_are_those_of_the_loop():
    phases = {name for name, call in vars(TokenLoop).items() if hasattr(call, "__wrapped__")}
    schema = json.loads((ROOT / "gptmanager" / "statistics.schema.json").read_text())
    latency = schema["properties"]["gptmanager"]["properties"]["iteration_latency_us"]
    (row,) = (row for row in rows(page("statistics.md")) if row[0] == "iteration_latency_us")
    assert phases | {"total"} == latency["properties"].keys() == set(re.findall(r"`(\w+)`", row[1]))
    assert phases <= set(re.findall(r"\w+", page("loop.md").split("```")[1]))


def test_the_loop_is_about_25_lines():
    tree = ast.parse((ROOT / "gptmanager" / "loop" / "token_loop.py").read_text(encoding="utf-8"))
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
    assert set(table_names(section)) - {"name", "---"} == set(TENSORS)


def test_the_statistics_tables_are_those_of_the_schema():
    schema = json.loads((ROOT / "gptmanager" / "statistics.schema.json").read_text())
    flat = schema["properties"]
    names = set(flat) - {"gptmanager"} | set(flat["gptmanager"]["properties"])
    assert set(table_names(page("statistics.md"))) - {"key", "---"} == names


def test_the_reasons_of_explain_are_those_of_the_policies_and_its_own():
    own = set(
        re.findall(r'(?:return|Explanation\(request_id,) "(\w+)"', inspect.getsource(inspection))
    )
    documented = {
        code(cells[0]) for cells in rows(section("scheduling.md", "### Why a request waits"))
    }
    assert len(own) == 5 and documented == own | {reason.value for reason in WaitReason}


def test_the_rules_of_schedulers_are_those_of_the_kit():
    table = page("testing.md").split("| rule | says |")[1].split("\n\n")[0]
    assert dict(re.findall(r"^\| ([a-z]+[a-z-]*) \| (.*) \|$", table, re.MULTILINE)) == RULES


def keywords(function):
    """Parameters that have a default, with it, as a page shows them."""
    parameters = inspect.signature(function).parameters.values()
    return {it.name: it.default for it in parameters if it.default is not it.empty}


def test_the_keywords_of_load_model_are_documented_with_their_defaults():
    found = rows(section("own_model.md", "## Wrapping a shipped network"))
    assert {code(name): eval(code(default)) for name, default, _ in found} == keywords(load_model)


def test_every_field_of_a_batch_is_documented_once():
    documented = [code(name) for name, *_ in rows(section("own_model.md", "## The batch"))]
    assert sorted(documented) == sorted(field.name for field in dataclasses.fields(Batch))


def test_every_field_of_a_spec_is_documented_and_no_attribute_that_it_lacks():
    first_cells = [cells[0] for cells in rows(section("own_model.md", "## What it returns"))]
    documented = set(re.findall(r"`(\w+)`", " ".join(first_cells)))
    assert {field.name for field in dataclasses.fields(ModelSpec)} <= documented
    assert [name for name in documented if not hasattr(ModelSpec, name)] == []


def numbers(values, prefix=""):
    """The names in an object, those of objects inside with a dot."""
    for name, value in values.items():
        yield from numbers(value, f"{name}.") if isinstance(value, dict) else [prefix + name]


def test_every_figure_of_a_simulation_is_documented_as_it_is_printed():
    figures = simulate(hypothetical(Machine(), 9), SyntheticLoad(1, (4, 4), (3, 3)), CostModel())
    found = rows(section("simulation.md", "## The figures"))
    named = [code(name) for name, *_ in found]
    assert sorted(named) == sorted(numbers(plain(figures)))
    labels = [label for _, label, _ in found if label != "-"]
    assert labels == [line.split("  ")[0] for line in lines([figures_table({"a": figures})])[1:]]
    for field in dataclasses.fields(figures):
        assert type(getattr(figures, field.name)) is not tuple, field.name


def test_the_shown_simulation_is_what_its_command_prints(capsys):
    command, shown = re.findall(r"^```\n(.*?)```", page("simulation.md"), re.DOTALL | re.MULTILINE)[
        :2
    ]
    assert cli.main(shlex.split(command)[1:]) == 0
    assert capsys.readouterr().out.lstrip("\n").startswith(shown)


def test_scripts_run_by_their_documented_commands_find_their_imports():
    support = {path.stem for path in (ROOT / "tests/support").glob("*.py")}
    text = "".join(path.read_text(encoding="utf-8") for path in PAGES)
    commands = re.findall(r"(PYTHONPATH=tests/support )?python (tests/[\w/]+\.py)", text)
    assert len(commands) > 5
    for path_is_set, script in commands:
        source = (ROOT / script).read_text(encoding="utf-8")
        imported = set(re.findall(r"^(?:from|import) (\w+)", source, re.MULTILINE))
        assert path_is_set or "sys.path" in source or not imported & support, script


def test_every_part_of_a_comparison_in_json_is_documented():
    given = Comparison({}, CostModel(), 1.0, None, None).plain()
    text = section("simulation.md", "## The figures").rpartition("Next to")[2]
    assert set(given) <= set(re.findall(r"`(\w+)`", text))


def calls(cls):
    """What is public in a class, with its arguments: `name(argument, other=1)`, or `name`.

    A property that gives a method begins its docstring with the call.
    """
    for name in dir(cls):
        member = inspect.getattr_static(cls, name)
        if not name.startswith("_"):
            if not callable(member):
                shown = re.match(r"`(\w+\(.*?\))`", inspect.getdoc(member) or "")
                yield shown[1] if shown else name
                continue
            parameters = list(inspect.signature(member).parameters.values())[1:]
            plain = [str(it.replace(annotation=it.empty)) for it in parameters]
            yield f"{name}({', '.join(plain)})"


def documented_names(text):
    """The first cells of a text's tables, of which one may hold several."""
    return [code(name) for cells in rows(text) for name in cells[0].split(", `")]


def test_every_call_of_the_kv_cache_manager_is_documented_once():
    titles = "## What a policy asks", "## What if", "## What the loop does", "## Proof"
    documented = [code(cells[0]) for it in titles for cells in rows(section(CACHE_PAGE, it))]
    errors = {"CapacityError", "DuplicateRequestIdError", "ValueError", "request_id in cache"}
    assert sorted(set(documented) - errors) == sorted(calls(KvCacheManager))
    assert len(set(documented)) == len(documented)


@pytest.mark.parametrize(
    ("cls", "title"),
    [(KvCacheManager, "## The constructor"), (LlmRequest, "### Its constructor")],
)
def test_the_arguments_of_the_schedulers_objects_are_documented_with_their_defaults(cls, title):
    found = {code(cells[0]): code(cells[1]) for cells in rows(section(CACHE_PAGE, title))}
    for name, default in keywords(cls).items():
        assert eval(found[name], {"LlmRequestState": LlmRequestState}) == default, name


def test_every_attribute_of_a_request_is_documented():
    documented = documented_names(section(CACHE_PAGE, "## Requests, as schedulers see them"))
    assert set(documented) == set(calls(LlmRequest))


def test_the_constructor_is_documented_argument_by_argument():
    documented = [(code(name), code(default)) for name, default, *_ in rows(section(*CONSTRUCTOR))]
    arguments = list(inspect.signature(GptManager).parameters.values())
    defaults = ["mandatory" if a.default is a.empty else repr(a.default) for a in arguments]
    assert documented == list(zip([a.name for a in arguments], defaults, strict=True))


def test_the_answer_to_health_is_documented_attribute_by_attribute():
    names = [
        name
        for cells in rows(section("manager.md", "## What it answers"))
        for name in cells[0].split(", ")
    ]
    assert [*map(code, names)] == [field.name for field in dataclasses.fields(Health)]


def described(cls):
    """The rows of the tables of a configuration, by field."""
    found = rows(section("manager.md", f"## {cls.__name__}"))
    names = [code(cells[0]) for cells in found]
    assert len(set(names)) == len(names), "a field is documented twice"
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("cls", CONFIGURATIONS, ids=lambda cls: cls.__name__)
def test_every_field_of_a_configuration_is_documented_with_its_default(cls):
    documented, default = described(cls), cls()
    assert set(documented) == {field.name for field in dataclasses.fields(cls)}
    for name, cells in documented.items():
        shown = eval(code(cells[2]), vars(config))
        assert (type(shown), shown) == (type(getattr(default, name)), getattr(default, name)), name


def spelled(hint):
    """The words of the page for a type."""
    if typing.get_origin(hint) is typing.Literal:
        return {json.dumps(value) for value in typing.get_args(hint)}
    if typing.get_origin(hint) in (typing.Union, type(int | str)):
        return set().union(*map(spelled, typing.get_args(hint)))
    if hint is type(None):
        return {"None"}
    names = {typing.Any: "object", list[int]: "list[int]"}
    return {names.get(hint) or re.sub(r"\[.*", "", f"{hint.__module__}.{hint.__qualname__}")}


@pytest.mark.parametrize("cls", CONFIGURATIONS, ids=lambda cls: cls.__name__)
def test_every_field_of_a_configuration_is_documented_with_its_type(cls):
    hints = typing.get_type_hints(cls)
    for name, cells in described(cls).items():
        words = {word.rsplit(".", 1)[-1] for word in spelled(hints[name])}
        documented = {word.rsplit(".", 1)[-1] for word in code(cells[1]).split(" or ")}
        assert documented == words, name


def checked(cls, **values):
    """What the check of configurations says of these values."""
    if cls is config.SchedulerConfig:
        return checked_scheduler_config(cls(**values))
    if cls is config.OptionalParams:
        return checked_optional_params(cls(**values))
    (holder,) = (
        field.name
        for field in dataclasses.fields(config.OptionalParams)
        if cls.__name__ in str(field.type)
    )
    return checked_optional_params(config.OptionalParams(**{holder: cls(**values)}))


def limits_in(cls):
    return [
        (cls, name, *(eval(bound.replace("^", "**")) for bound in cells[3].split(" to ")))
        for name, cells in described(cls).items()
        if " to " in cells[3]
    ]


@pytest.mark.parametrize(
    ("cls", "name", "low", "high"),
    [limits for cls in CONFIGURATIONS for limits in limits_in(cls)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_the_documented_limits_are_the_last_values_that_are_taken(cls, name, low, high):
    others = {it: value for it, value in NEEDED.get(name, {}).items() if hasattr(cls(), it)}
    is_float = isinstance(getattr(cls(), name), float) or name.endswith("_s")
    for bound, beyond in ((low, -math.inf), (high, math.inf)):
        checked(cls, **others, **{name: bound})
        beyond = math.nextafter(bound, beyond) if is_float else bound + (1 if beyond > 0 else -1)
        with pytest.raises(ConfigError, match=f"{cls.__name__}.{name} = "):
            checked(cls, **others, **{name: beyond})


@pytest.mark.parametrize("cls", CONFIGURATIONS, ids=lambda cls: cls.__name__)
def test_every_number_is_documented_with_its_limits(cls):
    for name, cells in described(cls).items():
        if {"int", "float"} & set(code(cells[1]).split(" or ")):
            assert re.fullmatch(r"\S+ to .*|the default|above 0, below 1", cells[3]), name


@pytest.mark.parametrize("cls", CONFIGURATIONS, ids=lambda cls: cls.__name__)
def test_fields_are_refused_off_their_defaults_where_the_page_says_so(cls):
    for name, cells in described(cls).items():
        default = getattr(cls(), name)
        other = not default if isinstance(default, bool) else 3 if default != 3 else 4
        if cells[3] == "the default":
            with pytest.raises(ConfigError, match=f"{cls.__name__}.{name} = .* is refused"):
                checked(cls, **{name: other})


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
    for target in re.findall(r"\]\(([^):]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), target


def anchors(path):
    """What GitHub makes of the headings of a page."""
    titles = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}
