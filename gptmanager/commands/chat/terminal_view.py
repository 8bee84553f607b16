"""`TerminalView`: a chat on a terminal. Answers appear as they are generated."""

from __future__ import annotations

import contextlib
import io
import sys
import termios
import time
from collections.abc import Iterator, Sequence

from rich.table import Table
from rich.text import Text

from gptmanager.commands.chat.answers import Answers
from gptmanager.commands.chat.interrupts import each_interrupt_raises, on_interrupt
from gptmanager.commands.chat.message_lines import Entry, read_message
from gptmanager.commands.chat.transcript import Piece, Transcript
from gptmanager.terminal.printable import printable_lines, printable_text
from gptmanager.terminal.redrawn_lines import RedrawnLines, console
from gptmanager.terminal.signals import Terminated
from gptmanager.terminal.streams import print_output

with contextlib.suppress(ImportError):  # with readline, `input` edits and recalls lines
    import readline  # noqa: F401

_PATIENCE_S = 0.5  # if no answer begins within this time, say that the message is being read
_REFRESH_S = 0.1
_GAP = 3  # columns between two answers
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


class TerminalView:
    """Reads messages with `input`. `region` shows drawings until the final text replaces them.

    With `shows_thoughts`, the model's thoughts appear before its answer, dimmed.
    """

    exit_status = 0  # also after errors, which a person has seen

    def __init__(self, region: RedrawnLines, shows_thoughts: bool = True) -> None:
        self._region = region
        self._shows_thoughts = shows_thoughts
        self._console = console(sys.stdout)
        self._was_interrupted = False
        if isinstance(sys.stdin, io.TextIOWrapper):
            sys.stdin.reconfigure(errors="replace")

    def welcome(self, model: str) -> None:
        self._region.clear()
        self.note(model)
        self.note("/help lists the commands, Ctrl-D ends the chat")

    def read(self) -> Entry:
        """Return the next message or command. Raises EOFError at the end of the chat.

        Ctrl-C discards the typed text, and a second Ctrl-C in a row ends the chat.
        """
        while True:
            try:
                with each_interrupt_raises():
                    entry = read_message(lambda continues: input("... " if continues else ">>> "))
            except EOFError:
                print_output()
                raise
            except KeyboardInterrupt as interrupt:
                print_output()
                if isinstance(interrupt, Terminated):
                    raise
                if self._was_interrupted:
                    raise EOFError from None
                self._was_interrupted = True
                self.note("Ctrl-C again, or Ctrl-D, ends the chat")
                continue
            self._was_interrupted = False
            return entry

    def show(self, answers: Answers) -> None:
        """Show the answers as they are generated.

        Ctrl-C stops the answers, and a second Ctrl-C ends the program.
        """
        transcripts = [Transcript(self._shows_thoughts) for _ in range(len(answers))]
        with _without_echo(), on_interrupt(answers.stop):
            try:
                self._follow(answers, transcripts)
            finally:
                self._region.clear()
        for number, transcript in enumerate(transcripts, 1):
            if len(transcripts) > 1:
                self._dim(f"answer {number}")
                self._print(transcript.pieces)
            print_output(end="" if transcript.ends_line else "\n")

    def note(self, text: str) -> None:
        self._dim(text)

    def error(self, text: str) -> None:
        self._console.print(Text(printable_lines(text), "red"), soft_wrap=True)

    def report(self, text: str) -> None:
        self._dim(text)

    def _follow(self, answers: Answers, transcripts: Sequence[Transcript]) -> None:
        began = drawn = time.monotonic()
        for new in answers:
            now = time.monotonic()
            pieces = [one.push(parts) for one, parts in zip(transcripts, new, strict=True)]
            has_text = any(one.pieces for one in transcripts)
            if len(new) == 1 and pieces[0]:
                self._region.clear()
                self._print(pieces[0])
            elif now >= drawn + _REFRESH_S and self._region.can_draw:
                drawn = now
                if has_text and len(new) > 1:
                    texts = [_styled(one.pieces) for one in transcripts]
                    self._region.draw(_columns(texts, *self._region.size()))
                elif not has_text and now >= began + _PATIENCE_S:
                    has_begun = any(one.thoughts for one in answers.so_far)
                    activity = "thinking" if has_begun else "reading the message"
                    self._region.draw(f"{activity}, {now - began:.0f} s")

    def _print(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            text = printable_text(piece.text)
            if piece.is_aside and self._console.color_system is not None:
                text = f"{_DIM}{text}{_RESET}"  # the console would expand tabs
            print_output(text, end="")

    def _dim(self, text: str) -> None:
        self._console.print(Text(printable_lines(text), "dim"), soft_wrap=True)


@contextlib.contextmanager
def _without_echo() -> Iterator[None]:
    """Hide text that is typed while an answer appears. The next prompt shows the text."""
    before = termios.tcgetattr(sys.stdin)
    hidden = before.copy()
    hidden[3] &= ~termios.ECHO
    termios.tcsetattr(sys.stdin, termios.TCSANOW, hidden)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSANOW, before)


def _styled(pieces: Sequence[Piece]) -> Text:
    styles = ((printable_text(text), "dim" if is_aside else "") for text, is_aside in pieces)
    return Text.assemble(*styles)


def _columns(texts: Sequence[Text], width: int, height: int) -> Table:
    """Return a table with a column for each text, which shows the last lines of the text."""
    size = max(8, (width - _GAP * (len(texts) - 1)) // len(texts))
    # not `padding`: before rich 14.3, it narrows the columns, also at the end of a row
    table, cells = Table.grid(), list[Text]()
    for text in texts:
        if cells:
            table.add_column(width=_GAP)
            cells.append(Text())
        table.add_column(width=size)
        lines = text.wrap(console(io.StringIO()), size)
        cells.append(Text("\n").join(lines[-max(1, height - 3) :]))
    table.add_row(*cells)
    return table
