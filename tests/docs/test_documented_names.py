"""Every public name has its place in the documents, with its arguments."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gptmanager import InferenceRequest, errors
from gptmanager.callbacks import RequestQueue
from gptmanager.manager import inspection

ROOT = Path(__file__).resolve().parents[2]
TEXT = "\n".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
)
INLINE = "\n".join(re.findall(r"`[^`\n]+`", re.sub(r"```.*?```", "", TEXT, flags=re.DOTALL)))
CODE = re.sub(r"\s+", " ", INLINE + "".join(re.findall(r"```text\n(.*?)```", TEXT, re.DOTALL)))
MODULES = (
    "gptmanager",
    *(f"gptmanager.{it}" for it in "callbacks models scheduler testing".split()),
)
PUBLIC = [
    (name, getattr(importlib.import_module(module), name))
    for module in MODULES
    for name in importlib.import_module(module).__all__
]
# tables of their own (test_docs), or made by the library alone
WITHOUT_SIGNATURE = {
    "CheckpointModel", "Generation", "GptManager", "KvCacheManager", "LlmRequest", "load_model",
}  # fmt: skip
# values that the library hands out: their attributes count, not their constructors
RESULTS = (
    "ConformanceReport", "GenerationResult", "Health", "ModelSpec", "PlannedRequest", "Response",
    "Rope", "Scenario", "ScriptedSpec", "Violation",
)  # fmt: skip
WITH_METHODS = (
    "ContractChecker", "Generation", "GptManager", "GuidedDecoding", "InferenceRequest",
    "JsonLinesSink", "LoggingSink", "PrometheusSink", "RawKernelLogitsPostProcessor",
    "RecordingCallbacks", "RequestQueue", "TextStream", "TokenDefaults",
)  # fmt: skip
# what the library calls of itself, and what an abstract class says of it
NOT_FOR_HOSTS = {"open", "prepare", "name", "deliver", "fail", "values", "compiled"}


def shown(name: str, function: Any) -> str:
    """A call as the documents write it: no types, `...` for a default that has no literal."""
    parts = []
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        default = parameter.default
        if default is not parameter.empty and not isinstance(
            default, (type(None), bool, int, float, str, tuple)
        ):
            parameter = parameter.replace(default=Ellipsis)
        parts.append(parameter.replace(annotation=parameter.empty))
    empty = signature.replace(parameters=parts, return_annotation=signature.empty)
    return name + str(empty).replace("Ellipsis", "...").replace("(self, ", "(").replace(
        "(self", "("
    )


def methods(cls: type) -> Iterator[str]:
    for name in vars(cls):
        if not name.startswith("_") and name not in NOT_FOR_HOSTS:
            is_call = callable(getattr(cls, name))
            yield shown(name, getattr(cls, name)) if is_call else name


def is_called(value: Any) -> bool:
    if not isinstance(value, type):
        return callable(value)
    return not (
        issubclass(value, (enum.Enum, BaseException))
        or dataclasses.is_dataclass(value)
        or hasattr(value, "_fields")  # a named tuple: of values, as a dataclass
        or getattr(value, "_is_protocol", False)
    )


@pytest.mark.parametrize("name", [name for name, _ in PUBLIC])
def test_every_public_name_is_documented(name: str) -> None:
    assert re.search(rf"\b{name}\b", INLINE)


@pytest.mark.parametrize(
    "call",
    [
        shown(name, value)
        for name, value in PUBLIC
        if is_called(value) and inspect.getmodule(value) is not None
        if name not in WITHOUT_SIGNATURE
        if getattr(value, "__module__", "").startswith("gptmanager")
    ],
)
def test_every_public_call_is_shown_with_its_arguments(call: str) -> None:
    assert call.removesuffix("()") in CODE


@pytest.mark.parametrize("name", WITH_METHODS)
def test_every_method_is_shown_with_its_arguments(name: str) -> None:
    (cls,) = {value for other, value in PUBLIC if other == name}
    assert [it for it in methods(cls) if it not in CODE] == []


@pytest.mark.parametrize(
    "cls",
    [
        *(value for name, value in PUBLIC if name in RESULTS),
        *(inspection.AuditReport, inspection.Explanation, inspection.Fit),
    ],
    ids=lambda cls: cls.__name__,
)
def test_every_attribute_of_a_result_is_documented(cls: Any) -> None:
    names = [field.name for field in dataclasses.fields(cls) if not field.name.startswith("_")]
    assert [name for name in names if f"`{name}`" not in INLINE] == []


def test_every_error_is_documented() -> None:
    values = {name: it for name, it in vars(errors).items() if isinstance(it, type)}
    classes = [name for name, it in values.items() if issubclass(it, errors.GptManagerError)]
    assert [name for name in classes if not re.search(rf"\b{name}\b", TEXT)] == []


def test_every_attribute_of_a_public_class_has_a_docstring() -> None:
    attributes = {
        f"{cls.__name__}.{name}": getattr(cls, name)
        for _, cls in PUBLIC
        if inspect.isclass(cls)
        for name, value in vars(cls).items()
        if not name.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, (classmethod, property)))
    }
    assert len(attributes) > 150
    assert [name for name, value in attributes.items() if not inspect.getdoc(value)] == []


def test_alternate_constructors_return_the_class_that_they_are_called_on() -> None:
    for call in (RequestQueue.for_checkpoint, InferenceRequest.from_tokens):
        hints = typing.get_type_hints(call.__func__, vars(sys.modules[call.__module__]))
        assert isinstance(hints["return"], typing.TypeVar), call
