"""Thoughts of a model in `gptmanager chat`: shown, hidden, kept, and refused variables."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_texts import MODEL, ScriptedTexts

from gptmanager import GptManager, cli
from gptmanager.callbacks.answers.parsing import harmony_parser as harmony
from gptmanager.callbacks.answers.parsing.answer_parts import Content, Thought
from gptmanager.callbacks.answers.reasoning import AnswerStart, Reasoning
from gptmanager.commands.chat import answers as chat_answers
from gptmanager.commands.chat import chat_model, terminal_view
from gptmanager.commands.chat.answers import Answers
from gptmanager.commands.chat.conversation import Answer
from gptmanager.commands.chat.terminal_view import TerminalView, _styled
from gptmanager.commands.chat.transcript import Piece, Transcript
from gptmanager.terminal.redrawn_lines import RedrawnLines

TEMPLATES = Path(__file__).parents[1] / "server" / "chat_templates"
BOTH = [Thought("So"), Thought(" 42."), Content("It is"), Content(" 42.")]


@pytest.fixture
def chat(monkeypatch, capsys, tmp_path):
    """Pipe messages into a chat whose model has a template and says the given texts.

    Returns the exit status, the output, the errors and the prompts.
    """

    def chat(messages, texts, *options, template="qwen", **tags):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(messages.encode())))
        folder = tmp_path / "model"
        folder.mkdir()
        script = ScriptedTexts(folder, TEMPLATES / f"{template}.jinja", **tags)
        script.say(*texts)
        (folder / "model.safetensors").symlink_to(MODEL / "model.safetensors")
        made = lambda path, *rest: GptManager(script.model(), *rest)  # noqa: E731
        monkeypatch.setattr(chat_model, "GptManager", made)
        code = cli.main(["chat", "--model", str(folder), "--temperature", "0", *options])
        return code, *capsys.readouterr(), script.prompts

    return chat


def test_pipes_have_the_answer_and_the_next_prompt_what_its_template_keeps(chat, tmp_path):
    texts = ("<think>\nSo 42.\n</think>\n\nIt is 42.", "Yes.")
    file = tmp_path / "chat.json"
    code, out, err, prompts = chat(f"17 + 25?\nSure?\n/save {file}", texts)
    assert (code, out) == (0, "It is 42.\nYes.\n") and "saved" not in err
    assert "So 42." not in prompts[1] and "\nIt is 42.<|im_end|>" in prompts[1]
    answer = json.loads(file.read_bytes())["messages"][1]
    assert answer == {"role": "assistant", "content": "It is 42.", "reasoning_content": "So 42."}


def test_tags_that_are_special_tokens_mark_thoughts_too(chat):
    text = (
        "<|channel|>analysis<|message|>So 42.<|end|><|start|>assistant<|channel|>final<|message|>"
    )
    options = ("--reasoning-effort", "high")
    code, out, _, prompts = chat(
        "17 + 25?", [f"{text}It is 42."], *options, template="harmony", special=harmony.TAGS
    )
    assert (code, out) == (0, "It is 42.\n") and "Reasoning: high" in prompts[0]


def test_a_variable_that_the_template_knows_is_passed_and_another_refused(chat, capsys):
    code, out, _, prompts = chat("17 + 25?", ["42."], "--no-enable-thinking")
    assert (code, out) == (0, "42.\n") and "<think>\n\n</think>" in prompts[0]
    assert cli.main(["chat", "--model", str(MODEL), "--enable-thinking"]) == 2
    assert capsys.readouterr().err == (
        "gptmanager: --enable-thinking has no effect, because the chat template has no such "
        "variable: leave the option out\n"
    )


def test_thoughts_through_pipes_if_asked_for_and_thoughts_without_an_answer(chat):
    texts = ("<think>So it is" * 9, "<think>So 42.</think>It is 42.")
    options = ("--thoughts", "show", "--max-new-tokens", "30")
    code, out, err, prompts = chat("17 + 25?\nAnd?", texts, *options)
    assert code == 1 and "17" not in prompts[1]
    first, shown = out.rsplit("thinking\n", 1)
    assert first.startswith("thinking\nSo it is<think>So") and first.endswith("\n")
    assert shown == "So 42.\nanswer\nIt is 42.\n"
    assert err == (
        "gptmanager: the answer has thoughts only, so the message is not part of the conversation; "
        "cut off: --max-new-tokens allows longer answers\n"
    )


def test_tags_may_arrive_in_pieces(monkeypatch):
    """What may begin a tag waits for the next piece, and the last piece is shown as it is."""
    pieces = ["<thi", "nk>So 4", "2.</thi", "nk>It is", " 42 <thi"]

    def next_part(position):
        text = pieces.pop(0)
        position.is_at_end = not pieces
        return SimpleNamespace(text=text)

    monkeypatch.setattr(chat_answers, "_INTERVAL_S", 0)
    parser = AnswerStart(Reasoning.THINK).parser(None, None)
    answers = Answers([SimpleNamespace(next_part=next_part)], [parser])
    found = [one for (parts,) in answers for one in parts]
    thoughts = "".join(one.text for one in found if isinstance(one, Thought))
    assert (thoughts, answers.so_far) == ("So 42.", [Answer("It is 42 <thi", "So 42.")])


def test_a_transcript_has_a_line_at_each_change():
    shown, hidden = Transcript(True), Transcript(False)
    begin, end = Piece("thinking\n", True), Piece("\nanswer\n", True)
    pieces = [Piece("So", True), Piece(" 42.", True), Piece("It is"), Piece(" 42.")]
    assert [piece for part in BOTH for piece in shown.push([part])] == shown.pieces
    assert shown.pieces == [begin, *pieces[:2], end, *pieces[2:]]
    assert hidden.push(BOTH) == pieces[2:] and not hidden.ends_line
    again = shown.push([Thought("Or?\n"), Content("No.\n")])
    assert [piece.text for piece in again] == ["\nthinking\n", "Or?\n", "answer\n", "No.\n"]
    assert shown.ends_line


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_dims_thoughts(monkeypatch, no_color):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    view, transcript = TerminalView(RedrawnLines(None)), Transcript(True)
    for part in ([Thought("a\tb [red]\n")], [Thought("\x1b[1mc")], [Content("d\x1b")]):
        view._print(transcript.push(part))
    lines = ["thinking", "a\tb [red]", "\N{REPLACEMENT CHARACTER}[1mc", "answer", ""]
    plain = out.getvalue().replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert plain == "\n".join(lines) + "d\N{REPLACEMENT CHARACTER}"
    assert ("\x1b[2m" in out.getvalue()) is not bool(no_color)
    assert "\x1b[2md" not in out.getvalue()
    styles = [span.style for span in _styled(transcript.pieces).spans]
    assert [it for it in styles if it] == ["dim"] * 4  # before rich 13.4, plain text has a span


def test_hidden_thoughts_on_a_terminal_leave_a_line_that_is_redrawn(monkeypatch, capsys):
    drawn = []
    region = SimpleNamespace(can_draw=True, clear=lambda: None, draw=drawn.append)
    monkeypatch.setattr(terminal_view, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(terminal_view, "_REFRESH_S", 0.0)
    answers = Answers([None], [None])

    def parts():
        yield [[]]
        answers.so_far = [Answer("", "So")]
        yield [[BOTH[0]]]
        yield [BOTH[1:]]

    monkeypatch.setattr(Answers, "__iter__", lambda answers: parts())
    TerminalView(region, False)._follow(answers, [Transcript(False)])
    assert drawn == ["reading the message, 0 s", "thinking, 0 s"]
    assert capsys.readouterr().out == "It is 42."
