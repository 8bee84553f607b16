"""Names that are loaded when they are first used: nothing is lost, and `--help` loads nothing."""

import argparse
import ast
import importlib
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import gptmanager
from gptmanager import cli
from gptmanager.environment.lazy_names import lazy_names, named

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = [
    "gptmanager",
    *(f"gptmanager.{it}" for it in "bench callbacks picture replay simulator".split()),
]
HEAVY = ("torch", "numba", "numpy", "tokenizers", "rich")


def commands(parser: argparse.ArgumentParser, *names: str):
    """Every command with its parser, itself first."""
    yield names, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from commands(child, *names, name)


COMMANDS = dict(commands(cli.command_parser()))


def test_help_and_version_load_nothing_heavy():
    calls = [["--version"], [], ["nonsense"], *([*names, "--help"] for names in COMMANDS)]
    assert ["bench", "kernels", "--help"] in calls and ["serve", "--help"] in calls
    code = f"""
import json, sys
from gptmanager.cli import main
for call in {calls!r}:
    try:
        main(call)
    except SystemExit as end:
        assert end.code in (0, 2)
    print(json.dumps([call, sorted(set({HEAVY!r}) & sys.modules.keys())]), file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    found = [json.loads(it) for it in done.stderr.splitlines() if it.startswith("[")]
    assert found == [[call, []] for call in calls]


def test_every_command_names_a_function():
    for names, parser in COMMANDS.items():
        if names:
            assert callable(named(parser.get_default("command"))), names


@pytest.mark.parametrize("package", PACKAGES)
def test_type_checkers_see_the_names_that_are_loaded(package):
    module = importlib.import_module(package)
    seen, table = {}, {}
    for node in ast.walk(ast.parse(Path(module.__file__).read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.col_offset:  # below `if TYPE_CHECKING:`
            seen |= {alias.name: node.module for alias in node.names}
        if isinstance(node, ast.Dict):
            homes = ast.literal_eval(node)
            table |= {name: home for home, names in homes.items() for name in names}
    assert seen == table and set(table) == set(module.__all__)
    for name, home in table.items():
        assert getattr(module, name) is getattr(importlib.import_module(home), name)
        assert name in dir(module)


def test_loading_every_module_hides_no_name():
    """A module named as a function of its package would take its place."""
    for package in PACKAGES[1:]:
        module = importlib.import_module(package)
        assert not {path.stem for path in Path(module.__file__).parent.glob("*.py")} & {
            *module.__all__
        }


MODULES = {
    name
    for page in (ROOT / "README.md", *ROOT.glob("docs/**/*.md"))
    for name in re.findall(r"\bgptmanager\.([a-z]\w+)", page.read_text("utf-8"))
    if find_spec(f"gptmanager.{name}")
} | {"config"}


def test_modules_that_the_documents_name_need_no_import_of_their_own():
    assert {"callbacks", "config", "errors", "models", "scheduler", "statistics", "step",
            "testing", "cuda"} <= MODULES  # fmt: skip
    code = f"""
import sys, gptmanager
before = set(sys.modules)
assert set({MODULES!r}) <= set(dir(gptmanager))
assert not (set(sys.modules) - before or set({HEAVY!r}) & before)
assert issubclass(gptmanager.errors.CapacityError, gptmanager.errors.GptManagerError)
assert not set({HEAVY!r}) & set(sys.modules)
for name in {sorted(MODULES)!r}:
    assert getattr(gptmanager, name) is sys.modules["gptmanager." + name]
    assert name in vars(gptmanager)
assert "rich" not in sys.modules, "the library draws nothing"
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'gptmanager' has no attribute 'nothing'"):
        gptmanager.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        from gptmanager import nothing  # noqa: F401


def test_a_name_is_loaded_once(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_package", type(sys)("a_package"))
    homes = {"json": ("loads",), "absent": ("other",)}
    load, names = lazy_names("a_package", homes, ["within"])
    assert names()[-3:] == ["loads", "other", "within"]
    assert load("loads") is json.loads is sys.modules["a_package"].loads
    with pytest.raises(ModuleNotFoundError, match="absent"):
        load("other")


IN_SUB_INTERPRETER = """
try:
    import _xxsubinterpreters as interpreters
except ImportError:
    import _interpreters as interpreters
interpreters.run_string(interpreters.create(), '''
try:
    import gptmanager
except ImportError as error:
    print(error)
''')
"""


def test_an_import_in_a_sub_interpreter_is_refused():
    """Torch would wait forever. Since Python 3.12 the import of ctypes is refused before."""
    command = [sys.executable, "-c", IN_SUB_INTERPRETER]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=50)
    assert re.search("sub-?interpreter", ended.stdout), ended.stdout + ended.stderr
