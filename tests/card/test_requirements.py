"""A machine with a GPU has torch, CuPy, numba, what the library needs, pytest and hypothesis, and
no network: tests of kernels must not import anything else.
"""

import ast
import sys
from pathlib import Path

import pytest
from probe import NEEDED, TESTING

TESTS = Path(__file__).parents[1]
FOLDERS = (TESTS / "support", TESTS / "cuda", TESTS / "card")  # modules that tests import by name
THERE = {*NEEDED, *TESTING, *sys.stdlib_module_names, "_pytest", "gptmanager", "cuda"}


def imported(tree: ast.Module) -> list[str]:
    """Modules that are imported whenever this one is: none behind the first `importorskip`, in a
    function, or where an ImportError is suppressed.
    """
    names = []
    for node in tree.body:
        if "importorskip" in ast.dump(node):
            break
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module or "")
    return [name.partition(".")[0] for name in names]


def lacking(file: Path, tree: ast.Module) -> list[str]:
    """What `file` imports, directly or through modules of tests, that may not be there."""
    found, seen, todo = [], set(), [(file, tree)]
    while todo:
        path, parsed = todo.pop()
        for name in imported(parsed):
            own = [folder / f"{name}.py" for folder in FOLDERS if (folder / f"{name}.py").exists()]
            if own and own[0] not in seen:
                seen.add(own[0])
                todo.append((own[0], ast.parse(own[0].read_text("utf-8"))))
            elif not own and name not in THERE:
                found.append(f"{path.name} imports {name}")
    return found


FILES = [TESTS / "conftest.py", *sorted((TESTS / "cuda").glob("*.py"))]


def test_tests_of_kernels_run_with_what_a_gpu_machine_has():
    assert len(FILES) > 50
    assert [it for file in FILES for it in lacking(file, ast.parse(file.read_text("utf-8")))] == []


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import httpx", ["x.py imports httpx"]),
        ("from openai.types import Model", ["x.py imports openai"]),
        ("import running_server", ["running_server.py imports uvicorn"]),
        ("import torch, os", []),
        ("def lazy():\n    import httpx", []),
        ("import pytest\nhttpx = pytest.importorskip('httpx')\nimport openai", []),
    ],
)
def test_what_is_lacking(source, told):
    assert lacking(Path("x.py"), ast.parse(source)) == told
