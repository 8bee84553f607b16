"""Pages of the documentation site that are made from other files, and links that leave `docs/`.

MkDocs calls the functions `on_...` (`hooks` in mkdocs.yml). The pages in `docs/` are written for
readers of the repository. The site adds the files at its top, a page of all commands from their
`--help`, and a reference of the public names from their docstrings.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gptmanager import cli

ROOT = Path(__file__).resolve().parents[2]
TOP_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "reporting.md",
}
PUBLIC_MODULES = (
    "gptmanager",
    "gptmanager.callbacks",
    "gptmanager.scheduler",
    "gptmanager.models",
    "gptmanager.testing",
    "gptmanager.errors",
    "gptmanager.kernels",
    "gptmanager.memory",
    "gptmanager.cuda.emulator",
    "gptmanager.replay",
    "gptmanager.simulator",
    "gptmanager.bindings",
)
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^):#]*)(#[^)]*)?\)")


def generated_pages() -> dict[str, str]:
    """The Markdown of each generated page, by its path in the site."""
    pages = {name: (ROOT / file).read_text(encoding="utf-8") for file, name in TOP_PAGES.items()}
    pages = {name: linked(text, ROOT) for name, text in pages.items()}
    pages["commands.md"] = commands_page()
    return pages | {reference_path(name): reference_page(name) for name in PUBLIC_MODULES}


def reference_path(module: str) -> str:
    return f"reference/{module}.md"


def on_config(config: Any) -> Any:
    """Give headings GitHub's anchors, which the pages link to, and complete the navigation."""
    config.mdx_configs.setdefault("toc", {})["slugify"] = github_anchor
    benchmarks = sorted((ROOT / "docs" / "benchmarks").glob("*.md"), reverse=True)
    config.nav += [
        {"Benchmarks": [f"benchmarks/{path.name}" for path in benchmarks]},
        {"Reference": [{name: reference_path(name)} for name in PUBLIC_MODULES]},
    ]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages to those of `docs/`."""
    from mkdocs.structure.files import File  # only the build of the site has MkDocs

    for name, text in generated_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Mend the links of a page in `docs/` to files outside of it."""
    source = page.file.abs_src_path
    return linked(markdown, Path(source).parent) if source else markdown


def linked(markdown: str, folder: Path) -> str:
    """Return `markdown` with links that work in the site.

    `folder` is where the text is in the repository. A link to a page of the site leads there. The
    site does not contain code, so a link to it becomes its text.
    """

    def mended(link: re.Match[str]) -> str:
        is_image, text, target, anchor = link.groups()
        if not target:
            return link[0]
        path = (folder / target).resolve()
        if path.is_relative_to(ROOT / "docs"):
            file = path.relative_to(ROOT / "docs").as_posix()
        elif path.is_relative_to(ROOT) and path.name in TOP_PAGES and path.parent == ROOT:
            file = TOP_PAGES[path.name]
        else:
            return text
        depth = len(folder.relative_to(ROOT / "docs").parts) if folder != ROOT else 0
        return f"{is_image}[{text}]({'../' * depth}{file}{anchor or ''})"

    return _LINK.sub(mended, markdown)


def github_anchor(title: str, separator: str) -> str:
    """The anchor of a heading on GitHub."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", separator)


def commands_page() -> str:
    """The `--help` of each command."""
    parser = cli.command_parser()
    parts = ["# Commands", "", *_fenced(parser)]
    for name, command in _commands(parser):
        parts += ["", f"## gptmanager {name}", "", *_fenced(command)]
    return "\n".join(parts)


def _commands(parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _fenced(parser: argparse.ArgumentParser) -> list[str]:
    return ["```text", parser.format_help().rstrip(), "```"]


def reference_page(module: str) -> str:
    """One entry for each public name of a module: mkdocstrings replaces it by the docstring."""
    parts = [f"# {module}", "", inspect.getdoc(importlib.import_module(module)) or ""]
    for name, value in public_names(module).items():
        parts += ["", f"::: {_defined_at(module, name, value)}"]
    return "\n".join(parts)


def public_names(module: str) -> dict[str, Any]:
    """The values of a module's `__all__`; of a module without one, the classes that it defines."""
    found = importlib.import_module(module)
    names = getattr(found, "__all__", None) or [
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module
    ]
    return {name: getattr(found, name) for name in names}


def _defined_at(module: str, name: str, value: Any) -> str:
    """The dotted path under which mkdocstrings finds the source of a public name."""
    is_alias = isinstance(value, types.GenericAlias)  # in Python 3.10 it is a type as well
    if isinstance(value, (type, types.FunctionType)) and not is_alias:
        path = f"{value.__module__}.{value.__qualname__}"
    else:
        path = f"{module}.{name}"
    # `callbacks/` and `cuda/` are at the top of the repository.
    return re.sub(r"^gptmanager\.(callbacks|cuda)\b", r"\1", path)
