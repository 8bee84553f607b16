"""`Parser`: the parser of the command line and of its commands."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from gptmanager.errors import ConfigError, quoted
from gptmanager.terminal.option_sources import CONFIG, find_options, suggestion
from gptmanager.terminal.printable import printable_lines
from gptmanager.terminal.streams import print_output


class Parser(argparse.ArgumentParser):
    """A parser with printable errors: control characters in quoted arguments are replaced.

    An error also names the unknown options of the call, and the known options that they resemble:
    argparse alone reports only a missing option if the name of that option is misspelled. Options
    cannot be abbreviated: an option of another server would be read as one of ours that begins
    with its name, and a new option could change what an abbreviation means.

    If `variables` is not empty, options can also be set by environment variables with the prefix
    `variables`, and by a file that the option `--config` names. The command line has precedence,
    then the environment, then the file. With `variables`, the parsed options also have `origins`
    and `unknown_variables`: the fields `origins` and `unknown` of `FoundOptions`.
    """

    def __init__(self, *arguments: Any, variables: str = "", **by_name: Any) -> None:
        super().__init__(*arguments, **{"allow_abbrev": False, **by_name})
        self._variables = variables
        self._given: Sequence[str] | None = None  # the arguments, once they are parsed

    @property
    def actions(self) -> Sequence[argparse.Action]:
        """The options and other arguments of this parser."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        super().error(printable_lines("; ".join([message, *self._unknown_options(message)])))

    def _unknown_options(self, message: str) -> list[str]:
        """Return a phrase for each unknown option, except those that `message` already explains."""
        phrases = self._unexpected_model(message)
        names = [name[2:] for name in self._option_string_actions if name.startswith("--")]
        of_commands = {name for it in self._commands for name in it._option_string_actions}
        is_alone = sum(word.startswith("-") for word in message.split()) < 2
        for argument in self._given or ():
            name = argument.partition("=")[0]
            if name == "--" or (self._subparsers is not None and not name.startswith("-")):
                break  # the options of a command are behind its name
            if name in self._option_string_actions or not name.startswith("-"):
                continue
            if name in of_commands:
                phrases.append(f"{name} must be after the name of its command")
                continue
            phrase = suggestion(name.lstrip("-"), names, "--")
            if not phrase and not name.startswith("--"):
                continue  # it may be a value, such as -1
            if f" {name}" not in message:
                phrase = [f"unknown option {name}", *phrase]
            elif phrase and not is_alone:
                phrase = [name, *phrase]
            phrases += [": ".join(phrase)] if phrase else []
        return phrases

    def _unexpected_model(self, message: str) -> list[str]:
        """Return a phrase if the call begins with a model, as that of `vllm serve MODEL` does."""
        first = (self._given or [""])[0]
        if first.startswith("-") or not first or not message.endswith("required: --model"):
            return []
        return [f"did you mean --model {quoted(first)}?"]

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print the help, the version or an error.

        Raise GptManagerError or BrokenPipeError if the help cannot be printed. The argparse of some
        Python versions ignores this.
        """
        if file is None or file is sys.stderr:
            super()._print_message(message, file)
        elif message:
            print_output(message, end="")

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> tuple[Any, list[str]]:
        self._given = given = list(sys.argv[1:] if args is None else args)
        if self._variables and not {"-h", "--help"} & set(given):
            self._set_defaults(given)
        for command in self._commands:
            command._given = None
        parsed = super().parse_known_args(args, namespace)
        for command in self._commands:
            if command._given is not None:
                early = [it for it in given[: -1 - len(command._given)] if it != "--"]
                if early:  # argparse would ignore the ones that the command has, too
                    corrected = " ".join([command.prog, *command._given, *early])
                    command.error(f"{early[0]} must be after the name of the command: {corrected}")
        return parsed

    @property
    def _commands(self) -> Sequence[Parser]:
        """The parsers of the commands, if this parser has commands."""
        own = [it for it in self._actions if isinstance(it, argparse._SubParsersAction)]
        return [parser for it in own for parser in it.choices.values()]

    def _set_defaults(self, arguments: Sequence[str]) -> None:
        """Set the defaults of options from the environment and from the file of `--config`."""
        config = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
        config.add_argument(f"--{CONFIG}")
        try:
            file = config.parse_known_args(arguments)[0].config
            found = find_options(self._actions, file, self._variables, os.environ)
        except argparse.ArgumentError:  # no file after --config: argparse reports this later
            return
        except ConfigError as error:
            self.error(str(error))
        for action in self._actions:
            if action.dest in found.values:
                action.default, action.required = found.values[action.dest], False
        self.set_defaults(origins=found.origins, unknown_variables=found.unknown)
