"""The commands of a chat: lines such as `/clear` that change the conversation.

Each command returns a text for the person. `/fork` is not here, because it asks the model.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gptmanager.commands.chat.conversation import Conversation
from gptmanager.errors import ConfigError, quoted

HELP = """\
/clear          begin a new conversation; the system prompt stays
/system TEXT    set the system prompt; /system "" removes it, /system shows it
/fork TEXT      write two answers in parallel; without TEXT, to the last message again
/pick N         continue with answer N of the last /fork
/save FILE      write the messages as JSON
/help           show this list
/bye            end the chat, as Ctrl-D does

A line that ends with \\ continues on the next one. Three quotation marks (\"\"\") begin and end a
message of several lines. Ctrl-C stops an answer."""


class EndOfChat(Exception):
    """The person has ended the chat."""


def run_command(conversation: Conversation, text: str) -> str:
    """Run a command and return the text for the person.

    Raises EndOfChat for /bye, ConfigError for an unknown command or a wrong argument.
    """
    name, _, argument = text.partition(" ")
    command = _COMMANDS.get(name.strip())
    if command is None:
        raise ConfigError(f"unknown command {quoted(name.strip())}: /help lists the commands")
    return command(conversation, argument.strip())


def _clear(conversation: Conversation, argument: str) -> str:
    conversation.clear()
    return "a new conversation begins"


def _system(conversation: Conversation, argument: str) -> str:
    if not argument:
        return conversation.system or "no system prompt is set"
    conversation.system = None if argument.strip("\"'") == "" else argument
    return (
        "the system prompt is removed"
        if conversation.system is None
        else "the system prompt is set"
    )


def _pick(conversation: Conversation, argument: str) -> str:
    number = int(argument[:9]) if argument.isdecimal() else 0
    conversation.pick(number)
    return f"answer {number} continues"


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        raise ConfigError("/save needs the name of a file: /save chat.json")
    conversation.save(Path(os.path.expanduser(argument)))
    count = len(conversation.messages)
    return f"{count} {'message is' if count == 1 else 'messages are'} in {argument}"


def _help(conversation: Conversation, argument: str) -> str:
    return HELP


def _bye(conversation: Conversation, argument: str) -> str:
    raise EndOfChat


_COMMANDS: dict[str, Callable[[Conversation, str], str]] = {
    "/clear": _clear,
    "/system": _system,
    "/pick": _pick,
    "/save": _save,
    "/help": _help,
    "/?": _help,
    "/bye": _bye,
    "/exit": _bye,
    "/quit": _bye,
}
