"""The house: its rooms are those of docs/architecture.md."""

import re

from test_layers import ROOT, layers, modules

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def rooms():
    """Room -> what it holds, as tests/test_layers.py says it, in its order."""
    found = {}
    for name, description in layers().items():
        if "." not in name and name not in ("gptmanager", "__main__"):
            is_folder = name == "cuda" or modules(ROOT)[name].name == "__init__.py"
            found[name + ("/" if is_folder else ".py")] = description.replace(" (no torch)", "")
    return found


def test_the_page_has_every_room_in_its_order():
    rows = re.findall(r"^\| `([a-z_/.]+)` \| (.*) \|$", PAGE, re.MULTILINE)
    assert rows == list(rooms().items())


def test_the_rooms_are_the_folders():
    inside = {path.name for path in (ROOT / "gptmanager").iterdir() if path.name != "__pycache__"}
    data = {"__init__.py", "__main__.py", "py.typed", "statistics.schema.json"}
    outside = {"callbacks/", "cuda/"}
    assert {name.removesuffix("/") for name in rooms().keys() - outside} == inside - data
    assert len(inside) <= 32


def test_every_path_on_the_page_exists():
    paths = re.findall(r"`([a-z_]+(?:/[a-z_]*)*(?:\.py)?)`", PAGE)
    paths = {path for path in paths if "/" in path or path.endswith(".py")}
    assert len(paths) > 30
    assert [
        path for path in paths if not any((r / path).exists() for r in (ROOT, ROOT / "gptmanager"))
    ] == []
