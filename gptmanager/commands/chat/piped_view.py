"""`PipedView`: a chat through pipes, with messages from stdin and only the answers on stdout."""

from __future__ import annotations

import sys

from gptmanager.commands.chat.answers import Answers
from gptmanager.commands.chat.message_lines import Entry, read_message
from gptmanager.commands.chat.transcript import Transcript
from gptmanager.errors import ConfigError
from gptmanager.terminal.printable import printable_text
from gptmanager.terminal.streams import print_message, print_output


class PipedView:
    """Reads messages from the standard input, and prints answers on the standard output.

    With `shows_thoughts`, the answers have the model's thoughts. Errors and the results of commands
    are printed on the standard error output. Raises ConfigError if the standard input is closed.
    """

    def __init__(self, shows_thoughts: bool = False) -> None:
        self.exit_status = 0
        self._shows_thoughts = shows_thoughts
        if sys.stdin is None:  # `<&-`
            raise ConfigError("the standard input is closed, so no messages can be read")
        self._lines = sys.stdin.buffer
        self._is_safe = not sys.stdout.isatty()

    def welcome(self, model: str) -> None:
        if sys.stdin.isatty():
            print_message("each line is a message; Ctrl-D ends the chat")

    def read(self) -> Entry:
        """Return the next message or command. Raises EOFError at the end of the input."""
        return read_message(self._read_line)

    def show(self, answers: Answers) -> None:
        """Print a single answer while it is generated, several answers when all have ended."""
        transcripts = [Transcript(self._shows_thoughts) for _ in range(len(answers))]
        for new in answers:
            for transcript, parts in zip(transcripts, new, strict=True):
                pieces = transcript.push(parts)
                if len(answers) == 1:
                    self._print("".join(piece.text for piece in pieces))
        if len(answers) > 1:
            self._print("\n".join(transcript.text for transcript in transcripts))
        print_output(end="" if transcripts[-1].ends_line else "\n")

    def note(self, text: str) -> None:
        print_message(text)

    def error(self, text: str) -> None:
        self.exit_status = 1
        print_message(text)

    def report(self, text: str) -> None:
        """Do nothing, because a pipe gets no reports."""

    def _read_line(self, continues: bool) -> str:
        line = self._lines.readline()
        if not line:
            raise EOFError
        return line.decode("utf-8", "replace").rstrip("\r\n")

    def _print(self, text: str) -> None:
        if text:
            print_output(text if self._is_safe else printable_text(text), end="")
