"""The house: nothing in it has grown out of its size, and its docstrings are sentences."""

import ast
import configparser
import itertools
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from banned_forms import BANNED, banned_forms

import gptmanager
from gptmanager import GptManager, InferenceRequest, ModelType
from gptmanager.kernels.gemm.matmul_plan import packing_pays
from gptmanager.loop import TokenLoop
from gptmanager.testing import RecordingCallbacks

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("gptmanager", "callbacks", "cuda")
FILES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
SOURCES = sorted(
    path for kind in ("*.cu", "*.cuh", "*.cpp", "*.h") for path in ROOT.glob(f"cuda/**/{kind}")
)

# What a host or a checkpoint configures, and what schedulers see of a request.
MANY_ATTRIBUTES = {"Family", "OptionalParams", "ModelSpec", "LlmRequest"}


def num_attributes(class_):
    """Names that the methods of a class give to self, and fields of its body."""
    names = set()
    for node in ast.walk(class_):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names |= {node.attr} if getattr(node.value, "id", None) == "self" else set()
    for node in class_.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return len(names)


def is_argument_table(function):
    """Nothing but calls, one for each argument of a command."""
    return all(isinstance(node, (ast.Expr, ast.Assign)) for node in function.body)


def too_large(text):
    """What of a module is: (name, size)."""
    found = [("module", text.count("\n"))] if text.count("\n") > 400 else []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef) and node.name not in MANY_ATTRIBUTES:
            if num_attributes(node) > 20:
                found.append((node.name, num_attributes(node)))
        if isinstance(node, ast.FunctionDef):
            length = node.end_lineno - node.lineno + 1
            if length > 60 and not is_argument_table(node):
                found.append((node.name, length))
    return found


def found_in(paths, find):
    """What `find` finds in each of the files in which it finds something."""
    found = {path.relative_to(ROOT).as_posix(): find(path) for path in paths}
    return {path: problems for path, problems in found.items() if problems}


def test_nothing_has_outgrown_its_size():
    assert found_in(FILES, lambda path: too_large(path.read_text(encoding="utf-8"))) == {}


def test_what_is_too_large_is_found():
    fields = "".join(f"    f{i}: int\n" for i in range(20))
    method = "    def g(self):\n        self.f20 = 1\n"
    lines = "    if x:\n        pass\n" * 30
    assert too_large(f"class C:\n{fields}{method}") == [("C", 21)]
    assert too_large(f"def f():\n{lines}") == [("f", 61)]
    assert too_large("x\n" * 401) == [("module", 401)]


def test_the_wheel_has_every_package():
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    homes = {"callbacks": "gptmanager.callbacks", "cuda": "gptmanager.cuda"}
    parts = [path.parent.relative_to(ROOT).parts for path in FILES if path.name == "__init__.py"]
    own = {".".join((homes.get(first, first), *rest)) for first, *rest in parts}
    assert own <= {*setup["options"]["packages"].split()}


# A first sentence that begins so has no subject: it leans on the name above it.
DANGLING = re.compile(r"(Of|As|That|What|Who|Whose|So|Such)\b")


def dangling_docstrings(text):
    """Return the modules, classes and functions whose docstring begins without a subject."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds))
    return [
        getattr(node, "name", "module")
        for node in nodes
        if DANGLING.match(ast.get_docstring(node) or "")
    ]


def test_docstrings_begin_with_a_subject_or_a_verb():
    assert found_in(FILES, lambda path: dangling_docstrings(path.read_text(encoding="utf-8"))) == {}


def test_a_dangling_docstring_is_found():
    method = '    def f(self):\n        """Return it."""\n'
    text = '"""As others."""\nclass C:\n    """Of a step."""\n' + method
    assert dangling_docstrings(text) == ["module", "C"]
    assert dangling_docstrings("async def g():\n    '''What it is.'''") == ["g"]


# Words that leave open in the name of a test what does what.
VAGUE = "told|untold|who|whom|whoever|nobody|somebody|stands?|stood|beside|behind|brings?|brought"
VAGUE += "|(?<!there_)(?:is|are)_no|so_many|so_long"
NAMES = re.compile(rf"def (test(?:_\w+)?_(?:{VAGUE})(?:_\w+)?)\(")


def test_names_of_tests_are_plain():
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    assert found_in(tests, lambda path: NAMES.findall(path.read_text(encoding="utf-8"))) == {}
    text = "".join(f"def test_{name}(x):\n" for name in ("told", "a_who_b", "a_whole_is_not_b"))
    assert NAMES.findall(text) == ["test_told", "test_a_who_b"]


# Such a comment at the end of a line names no subject, or is only half a sentence.
DANGLING_COMMENT = re.compile(r"\S +(?:#|//) ((?:of|as|what|who|whose)\b.*)")


def dangling_comments(path):
    return DANGLING_COMMENT.findall(path.read_text(encoding="utf-8"))


def test_comments_at_the_end_of_a_line_have_a_subject():
    assert found_in([*FILES, *SOURCES], dangling_comments) == {}
    assert DANGLING_COMMENT.findall("x = 1  # of a step\n# of it\n") == ["of a step"]


def forms_of(path):
    return banned_forms(path.read_text(encoding="utf-8"), path.suffix)


def test_no_text_has_a_banned_form():
    assert found_in([*FILES, *SOURCES], forms_of) == {}


PLANTED = [
    "'x' is no number",
    "the block stands in the pool",
    "where its pages lie",
    "a request that bears weights",
    "what comes behind it",
    "a client that has gone",
    "the table beside it",
    "so many blocks",
    "the host is told",
    "requests whose pages",
    "each one who waits",
    "turned matrices",
    "this turn of the loop",
    "the product of both matrices",
    "rounded rows",
    "it brings an adapter",
    "a deputy of the loop",
    "its time was over",
    "nobody waits for it",
    "as good as done",
    "sums of what was read",
]


@pytest.mark.parametrize("text", PLANTED)
def test_a_planted_form_is_found(text):
    python = f"def f():\n    x = 1  # {text}\n"
    assert [it.partition(":")[0] for it in banned_forms(python, ".py")] == ["2"]
    assert banned_forms(f'raise ValueError(f"{text}")', ".py")
    assert banned_forms(f"int x;  // {text}", ".cu") and banned_forms(f"/* {text} */", ".cuh")


def test_every_banned_form_is_planted_and_code_has_none():
    assert all(any(re.search(form, text) for text in PLANTED) for form in BANNED)
    assert banned_forms("turned = who = product  # there is no block of 8\n", ".py") == []


def test_a_decode_step_passes_few_files(monkeypatch, capsys):
    """From the top of an iteration to its statistics record, with all defaults, on the CPU."""
    top = Path(gptmanager.__file__).parent.parent
    steps = []  # of each step: file -> the first function of it, in the order they came

    def profile(frame, event, argument):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(top)) and ".venv" not in name:
            steps[-1].setdefault(os.path.relpath(name, top), frame.f_code.co_name)

    iterations = []
    iterate = TokenLoop.iterate

    def profiled(loop):
        iterations.append(len(loop.active))
        if 6 <= len(iterations) <= 9:
            steps.append({})
            sys.setprofile(profile)
        try:
            return iterate(loop)
        finally:
            sys.setprofile(None)

    monkeypatch.setattr(TokenLoop, "iterate", profiled)
    host = RecordingCallbacks(InferenceRequest.from_tokens(i, [1, 2, 3], 20) for i in range(3))
    model = ROOT / "examples" / "tiny_llama"
    with GptManager(model, ModelType.INFLIGHT_FUSED_BATCHING, **host.keywords()) as manager:
        assert manager.wait_idle(30)
    assert iterations[5:9] == [3] * 4
    passed = min(steps, key=len)  # one may fall on the full second, when the clock is read anew
    print(*(f"{name} ({function})" for name, function in passed.items()), sep="\n")
    passed.pop("gptmanager/testing/hosts.py")  # the host of this test
    if not packing_pays():  # a product passes the reference's
        passed.pop("gptmanager/kernels/gemm/packed_matrix.py")
    assert len(passed) <= 26, capsys.readouterr().out


def test_which_tests_stay_out_of_everyday_runs(request, monkeypatch):
    """Slow tests, also in a file that is marked `every`, and all but one in k cases of a table.

    The others have all values of each parameter, also if k is the number of its values.
    """
    (plugin,) = (
        it
        for it in request.config.pluginmanager.get_plugins()
        if getattr(it, "__file__", "") == str(ROOT / "tests" / "conftest.py")
    )
    monkeypatch.setattr(plugin, "ALL_CASES", False)
    monkeypatch.setattr(plugin, "_WORKER", "")  # these items are in no order

    class Item:
        def __init__(self, name, params=None, **markers):
            self.nodeid, self.markers = name, markers
            self.callspec = SimpleNamespace(params=params or {})

        def get_closest_marker(self, name):
            return self.markers.get(name)

    class Config:
        args = ()
        hook = SimpleNamespace(pytest_deselected=lambda items: None)

    every = SimpleNamespace(args=(3,))
    cases = [Item(f"test_table[{i}]", every=every) for i in range(6)]
    slow = [Item("test_slow", slow=True), Item("test_race[0]", slow=True, every=every)]
    on_gpu = Item("test_table[gpu]", every=every, gpu=True)
    crossed = [
        Item(f"test_crossed[{x}-{y}]", {"x": x, "y": y}, every=every)
        for x, y in itertools.product("abc", range(3))
    ]
    items = [Item("test_plain"), *cases, *slow, on_gpu, *crossed]
    plugin.pytest_collection_modifyitems(Config, items)
    assert not set(items) & set(slow) and on_gpu in items and len(items) == 7
    chosen = [item.callspec.params for item in items if item in crossed]
    assert {it["x"] for it in chosen} == {*"abc"} and {it["y"] for it in chosen} == {0, 1, 2}
