"""Values of a command's options from environment variables and from a TOML file.

For example, the variable PREFIX_MAX_BATCH_SIZE and the file's key `max-batch-size` (or
`max_batch_size`) set the option `--max-batch-size`. The parser's own types and choices check the
values.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import shlex
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gptmanager.errors import ConfigError, error_summary, quoted, quoted_path
from gptmanager.terminal.other_servers import replacement

MAX_FILE_BYTES = 1 << 16
CONFIG = "config"
_SWITCH = {"1": True, "true": True, "yes": True, "on": True}
_SWITCH |= {"0": False, "false": False, "no": False, "off": False}


class Repeated(argparse.Action):
    """An option that may be given several times; its values replace the default list."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        given = getattr(namespace, self.dest)
        setattr(namespace, self.dest, [*(() if given is self.default else given), values])


@dataclass
class FoundOptions:
    """Option values that are not from the command line.

    `values` maps the `dest` of an option to its value, and `origins` maps the `dest` to a
    description of where the value is from. `unknown` lists the environment variables that have the
    prefix, but not the name of an option.
    """

    values: dict[str, Any] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)

    def add(self, action: argparse.Action, value: Any, origin: str) -> None:
        """Check and add a value. Raise ConfigError with a message that begins with `origin`."""
        try:
            self.values[action.dest] = _checked(action, value)
        except (argparse.ArgumentTypeError, TypeError, ValueError) as error:
            raise ConfigError(f"{origin}: {error}") from error
        self.origins[action.dest] = origin


def find_options(
    actions: Iterable[argparse.Action], file: str | None, prefix: str, variables: Mapping[str, str]
) -> FoundOptions:
    """Return the options that `file` or `variables` set. A variable overrides the file.

    If `file` is None, the variable PREFIX_CONFIG may have the path of a file.
    Raise ConfigError for a wrong value, and for a key of the file that is not an option.
    """
    by_name = {it.option_strings[0].lstrip("-"): it for it in actions if it.option_strings}
    by_name.pop("help", None)
    found = FoundOptions()
    variable = prefix + CONFIG.upper()
    file = variables.get(variable) if file is None else file
    by_name.pop(CONFIG, None)
    if file is not None:
        for key, value in _read(Path(file)).items():
            name, shown = key.replace("_", "-"), quoted_path(Path(file))
            if name not in by_name:
                raise ConfigError(
                    "; ".join(
                        [f"{shown}: unknown option {quoted(key)}", *suggestion(name, by_name)]
                    )
                )
            if by_name[name].dest in found.values:
                raise ConfigError(f"{shown}: {name} is in the file twice")
            found.add(by_name[name], value, f"{name} in {shown}")
    by_variable = {prefix + name.upper().replace("-", "_"): it for name, it in by_name.items()}
    for name, text in variables.items():
        if name in by_variable:
            found.add(by_variable[name], _from_text(by_variable[name], name, text), name)
        elif name.startswith(prefix) and name != variable:
            found.unknown.append(name)
    return found


def _read(file: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raise ConfigError if it is unreadable or too large."""
    shown, parser = quoted_path(file), _toml()
    try:
        with file.open("rb") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        is_whole = len(content) <= MAX_FILE_BYTES
        found: dict[str, Any] = parser.loads(content.decode()) if is_whole else {}
    except OSError as error:
        raise ConfigError(f"--config {shown} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--config {shown} must be TOML: {error_summary(error)}") from error
    if not is_whole:
        raise ConfigError(f"--config {shown} must have at most {MAX_FILE_BYTES} bytes")
    return found


def _toml() -> Any:
    """Return the parser of TOML: the standard library's, or before Python 3.11 the package tomli.

    Raise ConfigError if neither is installed.
    """
    for name in ("tomllib", "tomli"):
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise ConfigError("--config needs Python 3.11, or the package tomli: pip install tomli")


def _is_switch(action: argparse.Action) -> bool:
    return action.nargs == 0


def _is_list(action: argparse.Action) -> bool:
    return action.nargs == "+" or isinstance(action, Repeated)


def _from_text(action: argparse.Action, name: str, text: str) -> Any:
    """Return a variable's text as the value that a TOML file would have.

    Raise ConfigError if the text is invalid.
    """
    if _is_switch(action):
        if text.lower() not in _SWITCH:
            raise ConfigError(f"{name}: {quoted(text)} must be true or false")
        return _SWITCH[text.lower()]
    if not _is_list(action):
        return text
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{name}: {error}") from error


def _checked(action: argparse.Action, value: Any) -> Any:
    """Check a value of a TOML file or a variable, and convert it as argparse converts text."""
    if _is_switch(action):
        if not isinstance(value, bool):
            raise TypeError(f"must be true or false, not {_kind(value)}")
        return value
    if not _is_list(action):
        return _converted(action, value)
    values = [_converted(action, one) for one in (value if isinstance(value, list) else [value])]
    if not values and not isinstance(action, Repeated):
        raise ValueError("must have at least one value")
    return values


def _converted(action: argparse.Action, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise TypeError(f"must be a string or a number, not {_kind(value)}")
    convert: Any = action.type or str
    found = convert(str(value))
    if not isinstance(value, str) and not isinstance(found, (int, float)):
        raise TypeError(f"must be a string, not {_kind(value)}")  # 3.10 would become "3.1"
    if action.choices is not None and found not in action.choices:
        choices = ", ".join(map(str, action.choices))
        raise ValueError(f"{quoted(value)} must be one of {choices}")
    return found


def _kind(value: Any) -> str:
    names = {bool: "a boolean", dict: "a table", list: "an array", int: "a number"}
    return names.get(type(value), f"a {type(value).__name__}")


def suggestion(name: str, names: Collection[str], prefix: str = "") -> list[str]:
    """Return what to write in place of the unknown option `name`, or nothing.

    This is what takes the place of the same option of another server, or else a question with the
    most similar one of `names`.
    """
    name = name.replace("_", "-")
    known = replacement(name, names, prefix)
    if known:
        return [known]
    similar = difflib.get_close_matches(name[:100], names, n=1, cutoff=0.7)
    return [f"did you mean {prefix}{found}?" for found in similar]
