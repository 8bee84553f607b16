"""The loop of a chat: read and answer messages until the input ends or a person ends the chat.

A session decides what an answer adds to the conversation. A `View` decides how to show the answer.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Protocol

from gptmanager.callbacks import GenerationResult
from gptmanager.commands.chat.answers import Answers
from gptmanager.commands.chat.chat_model import ChatModel, for_chats, open_chat_model
from gptmanager.commands.chat.conversation import Answer, Conversation
from gptmanager.commands.chat.message_lines import Entry
from gptmanager.commands.chat.piped_view import PipedView
from gptmanager.commands.chat.slash_commands import EndOfChat, run_command
from gptmanager.commands.chat.terminal_view import TerminalView
from gptmanager.commands.follow import follow, is_follower
from gptmanager.config import FinishReason
from gptmanager.errors import ConfigError, RequestError
from gptmanager.terminal.options import manager_options
from gptmanager.terminal.printable import printable
from gptmanager.terminal.progress import NOTES, ProgressBars


class View(Protocol):
    """The terminal or the pipes of a chat, which read the messages and show the answers.

    `welcome` shows the model, `note` the text of a command, and `report` a line about an answer.
    """

    exit_status: int

    def welcome(self, model: str) -> None: ...
    def read(self) -> Entry: ...
    def show(self, answers: Answers) -> None: ...
    def note(self, text: str) -> None: ...
    def error(self, text: str) -> None: ...
    def report(self, text: str) -> None: ...


def converse(options: argparse.Namespace) -> int:
    """Run `gptmanager chat`, and return the exit status."""
    given = for_chats(manager_options(options))
    if is_follower(given.params):
        follow(options.model, given.params, given.scheduler, given.model_type)
        return 0
    is_terminal = sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()
    thoughts = options.thoughts or ("show" if is_terminal else "hide")
    shows = thoughts == "show"
    view: View = TerminalView(options.region, shows) if is_terminal else PipedView(shows)
    given.params.on_progress = ProgressBars(options.region, notes=NOTES).update
    with open_chat_model(options, given) as model:
        options.region.clear()
        name = printable(options.model.name.removesuffix(".gguf"))
        view.welcome(f"{name}, a context of {model.context_size:,} tokens")
        Session(model, Conversation(options.system), view).run()
    return view.exit_status


class Session:
    """One conversation with a model, from its first message to its end."""

    def __init__(self, model: ChatModel, conversation: Conversation, view: View) -> None:
        self._model = model
        self._conversation = conversation
        self._view = view

    def run(self) -> None:
        """Run until the chat ends. A message or a command that is refused does not end it."""
        while True:
            try:
                self._take(self._view.read())
            except (EOFError, EndOfChat):
                return
            except (ConfigError, RequestError) as error:
                self._view.error(str(error))

    def _take(self, entry: Entry) -> None:
        name, _, argument = entry.text.partition(" ")
        if not entry.is_command:
            if entry.text.strip():
                self._ask(entry.text, 1)
        elif name == "/fork":
            self._fork(argument.strip())
        else:
            self._view.note(run_command(self._conversation, entry.text))

    def _fork(self, question: str) -> None:
        if not self._model.samples:
            raise ConfigError(
                "two answers would be the same without sampling: start with --temperature 0.7"
            )
        last = self._conversation.last_question
        if not question and last is None:
            raise ConfigError("/fork needs a message, because none has been answered yet")
        self._ask(question or last or "", 2, again=not question)

    def _ask(self, question: str, count: int, *, again: bool = False) -> None:
        messages = self._conversation.asking(question, again=again)
        answers = self._model.start(messages, count)
        self._view.show(answers)
        results = answers.results()
        if not any(answer.content for answer in answers.so_far):
            self._report_none(answers.so_far, results)
            return
        self._conversation.add(question, answers.so_far, again=again)
        for number, result in enumerate(results, 1):
            name = f"answer {number}: " if count > 1 else ""
            self._view.report(name + self._report(result))
        if count > 1:
            self._view.report("answer 1 continues; /pick 2 chooses the other")

    def _report_none(self, answers: Sequence[Answer], results: Sequence[GenerationResult]) -> None:
        """Say that no answer has content, so that the message is not part of the conversation."""
        end = "the message is not part of the conversation"
        has_thoughts = any(answer.thoughts for answer in answers)
        if not has_thoughts:
            self._view.report(f"the answer is empty: {end}")
        elif results[0].finish_reasons[0] is FinishReason.CANCELLED:
            self._view.report(f"stopped before the answer: {end}")
        else:
            parts = [f"the answer has thoughts only, so {end}", *self._why_cut(results[0])]
            self._view.error("; ".join(parts))

    def _report(self, result: GenerationResult) -> str:
        """Return a line about an answer: its tokens, its speed, the context, and why it ended."""
        metrics = result.metrics
        count = int(metrics["generated_tokens"])
        used, size = int(metrics["prompt_tokens"]) + count, self._model.context_size
        parts = [f"{count:,} {'token' if count == 1 else 'tokens'}"]
        seconds = metrics["last_token_s"] - metrics["first_token_s"]
        if seconds > 0:
            parts.append(f"{(count - 1) / seconds:,.1f} tokens/s")
        parts.append(f"context {used:,} of {size:,}")
        return ", ".join([*parts, *self._why_cut(result)])

    def _why_cut(self, result: GenerationResult) -> list[str]:
        """Return why an answer is incomplete; nothing if the model has ended it."""
        metrics, reason = result.metrics, result.finish_reasons[0]
        if reason is FinishReason.CANCELLED:
            return ["stopped"]
        if reason is not FinishReason.LENGTH:
            return []
        if metrics["prompt_tokens"] + metrics["generated_tokens"] >= self._model.context_size:
            return ["cut off, because the context is full: /clear begins a new conversation"]
        return ["cut off: --max-new-tokens allows longer answers"]
