"""`Tools`: the tools that a model may call in its answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SHOWN = ("name", "description", "parameters", "return")  # the keys that models are trained on


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a request.

    `listed` has the tools as the client sent them. `parameters` maps the name of each tool that may
    be called to the JSON schema of its arguments. If `required`, the answer must call one of the
    tools in `parameters`. With `parallel`, an answer may have several calls. With `lenient`, schema
    keywords that cannot be enforced are ignored.
    """

    listed: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Mapping[str, Any] | bool]
    required: bool
    parallel: bool
    lenient: bool = False

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each tool's arguments, by the name of the tool's grammar rule."""
        return {f"arguments_{i}": schema for i, schema in enumerate(self.parameters.values())}

    def for_template(self) -> list[dict[str, Any]]:
        """Return the tools for a chat template: only the keys that models are trained on."""
        functions = [tool["function"] for tool in self.listed]
        return [
            {
                "type": "function",
                "function": {
                    key: value
                    for key, value in function.items()
                    if key in _SHOWN and value is not None
                },
            }
            for function in functions
        ]

    def index_of(self, rule: str) -> int:
        """Return the index in `listed` of the tool that a grammar rule belongs to.

        Rule `arguments_N` is for entry N of `parameters`, which may have fewer tools than `listed`.
        Rule `arguments_N_M` is for parameter M of that tool alone.
        """
        name = list(self.parameters)[int(rule.split("_")[1])]
        return next(i for i, tool in enumerate(self.listed) if tool["function"]["name"] == name)

    def is_lenient(self, rule: str) -> bool:
        """Return whether the tool of a grammar rule has `strict: false`, or `lenient` is set."""
        is_own = self.listed[self.index_of(rule)]["function"].get("strict") is False
        return self.lenient or is_own
