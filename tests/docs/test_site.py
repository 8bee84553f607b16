"""The documentation site: its navigation, its generated pages, and the texts that it explains."""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def load_pages():
    spec = importlib.util.spec_from_file_location("site_pages", DOCS / "_site" / "pages.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


site = load_pages()
GENERATED = site.generated_pages()


def test_the_navigation_has_every_page():
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    listed = []
    for entry in yaml.safe_load(text)["nav"]:
        (pages,) = entry.values()
        listed += [pages] if isinstance(pages, str) else pages
    written = [path.name for path in DOCS.glob("*.md")]
    made = [name for name in GENERATED if not name.startswith("reference/")]
    assert sorted(listed) == sorted(written + made)


@pytest.mark.parametrize("name", GENERATED)
def test_links_of_generated_pages_lead_to_pages(name):
    for is_image, _, target, _ in site._LINK.findall(GENERATED[name]):
        assert not target or target in GENERATED or (DOCS / target).is_file(), (is_image, target)


def test_links_out_of_the_pages_become_text_or_pages():
    text = (
        "[a](../README.md#installing) [b](../examples/tiny_corpus.py) [c](loop.md#x) ![d](e/f.png) "
        "[g](#here) [h](https://example.org/x.md)"
    )
    mended = site.linked(text, DOCS)
    assert mended == (
        "[a](index.md#installing) b [c](loop.md#x) ![d](e/f.png) [g](#here) "
        "[h](https://example.org/x.md)"
    )
    inner = "[a](../models.md#on-the-cpu) [b](README.md)"
    assert site.linked(inner, DOCS / "benchmarks") == (
        "[a](../models.md#on-the-cpu) [b](../benchmarks/README.md)"
    )


def test_the_reference_and_the_commands_are_complete():
    pages = "\n".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    imported = set(re.findall(r"^from (gptmanager[\w.]*) import", pages, re.MULTILINE))
    packages = {name for name in imported if hasattr(importlib.import_module(name), "__all__")}
    assert packages <= {*site.PUBLIC_MODULES} and len(packages) > 5
    for module in site.PUBLIC_MODULES:
        page = GENERATED[site.reference_path(module)]
        for name in site.public_names(module):
            assert re.search(rf"^::: \S+\.{name}$", page, re.MULTILINE), name
    headings = re.findall(r"^## gptmanager (\w+)$", GENERATED["commands.md"], re.MULTILINE)
    assert {"chat", "run", "serve", "convert", "bench"} <= {*headings}
    assert "--max-batch-size" in GENERATED["commands.md"]


# The page of errors ---------------------------------------------------------------------------


@functools.cache
def templates():
    """Every text of the library's code, a line each, with `...` for what is formatted into it."""

    def written(node):
        if isinstance(node, ast.JoinedStr):
            return "".join(written(part) for part in node.values)
        return node.value if isinstance(node, ast.Constant) else "..."

    found = []
    for folder in ("gptmanager", "callbacks", "cuda"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
                if is_text or isinstance(node, ast.JoinedStr):
                    found.append(re.sub(r"%\.?\d*[sdgfr]", "...", written(node)))
    return "\n".join(found)


def unknown_parts(quoted):
    """The parts of a quoted text between its `...` that are in no text of the library."""
    return [
        part for part in quoted.split("...") if part.strip(" :,;()") and part not in templates()
    ]


def test_the_explained_texts_are_texts_of_the_library():
    page = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| `([^`]+)` \|", page, re.MULTILINE)
    assert len(quoted) > 30
    assert {text: parts for text in quoted if (parts := unknown_parts(text))} == {}
    assert unknown_parts("... requests wait for ever, max_waiting_requests = ...") != []


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("mkdocstrings", reason="needs mkdocstrings, of the extra docs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-d", tmp_path]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert "get_inference_requests_cb" in (tmp_path / "reference/gptmanager.html").read_text()
