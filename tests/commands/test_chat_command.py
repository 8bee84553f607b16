"""`gptmanager chat`: through pipes, and on a terminal."""

import io
import json
import os
import re
import signal
import sys
from pathlib import Path

import pytest
from pseudo_terminal import CTRL_C, CTRL_D, ENTER, PASTE, pseudo_terminal
from rich.console import Console
from rich.text import Text
from safetensors import safe_open
from text_checkpoint import save_text_checkpoint

from gptmanager import cli
from gptmanager.callbacks import generate
from gptmanager.commands.chat.chat_model import ChatModel
from gptmanager.commands.chat.interrupts import on_interrupt
from gptmanager.commands.chat.piped_view import PipedView
from gptmanager.commands.chat.terminal_view import _columns

TINY_LLAMA = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"
TEMPLATE = (
    "{% for message in messages %}{{ message.content }}\n{% endfor %}"
    "{% if messages[-1].content == 'think' %}<think>{# </think> #}{% endif %}"
)
GREEDY = ("--temperature", "0")


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Compile the kernels, so that no chat says that it does."""
    generate(TINY_LLAMA, "a", 2)


@pytest.fixture
def chat(monkeypatch, capsys):
    """Pipe a text into the command, and return its exit status, output and errors."""

    def chat(text, *options, model=TINY_LLAMA):
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        try:
            code = cli.main(["chat", "--model", str(model), *map(str, options)])
        except SystemExit as exit_:  # argparse
            code = exit_.code
        return code, *capsys.readouterr()

    return chat


@pytest.fixture(scope="module")
def endless(tmp_path_factory):
    """A checkpoint whose greedy answers do not end soon."""
    folder = save_text_checkpoint(tmp_path_factory.mktemp("checkpoints") / "text")
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = 1 << 18
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


# Through pipes -----------------------------------------------------------------------------------


def test_each_line_is_answered_and_nothing_else_is_printed(chat):
    told = "gptmanager: a new conversation begins\n"
    assert chat("17 + 25 =\n\n/clear\n30 + 12 =", *GREEDY) == (0, " 42\n 42\n", told)


def test_messages_of_several_lines_and_commands(chat, tmp_path):
    file = tmp_path / "chat.json"
    lines = [
        "/system Add.",
        "1 + 1\\",
        "17 + 25 =",
        '"""/no command',
        "2 + 3 =",
        '"""',
        f"/save {file}",
        "/clear",
        "30 + 12 =",
    ]
    code, out, err = chat("\n".join(lines), *GREEDY, "--system", "x")

    assert code == 0 and out.splitlines()[2] == " 42"
    assert err.splitlines() == [
        "gptmanager: the system prompt is set",
        f"gptmanager: 5 messages are in {file}",
        "gptmanager: a new conversation begins",
    ]
    messages = json.loads(file.read_bytes())["messages"]
    assert [message["role"] for message in messages] == ["system", *2 * ["user", "assistant"]]
    assert [message["content"] for message in messages[::2]] == ["Add.", *out.splitlines()[:2]]
    assert messages[1]["content"] == "1 + 1\n17 + 25 ="
    assert messages[3]["content"] == "/no command\n2 + 3 ="


def test_a_saved_chat_is_a_line_of_requests(chat, tmp_path, capsys):
    file = tmp_path / "chat.json"
    assert chat(f"/system 17 + 25 =\n/save {file}", *GREEDY)[0] == 0
    arguments = ["run", "--model", str(TINY_LLAMA), "--requests", str(file), "--output", "-"]
    assert cli.main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["text"] == " 42"


def test_a_fork_has_two_answers(chat, tmp_path):
    file = tmp_path / "chat.json"
    lines = ["/fork xyz", f"/save {file}", "/pick 2", f"/save {file}", "/fork", "17 + 25 ="]
    options = ("--max-new-tokens", 8, "--temperature", 3, "--top-k", 0, "--top-p", 1)
    code, out, err = chat("\n".join(lines[:2]), *options)
    first, second = out.splitlines()[:2]
    assert code == 0 and first != second
    assert json.loads(file.read_bytes())["messages"][-1]["content"] == first
    file.unlink()

    # seeds are the same again
    code, out, err = chat("\n".join(lines), *options)
    assert code == 0 and out.splitlines()[:2] == [first, second]
    assert json.loads(file.read_bytes())["messages"][-1]["content"] == second
    assert [*map(len, json.loads(file.read_bytes()))] == [8]
    assert err.splitlines()[1] == "gptmanager: answer 2 continues"


@pytest.mark.parametrize(
    ("options", "samples"),
    [
        ({}, True),
        ({"temperature": 0.0}, False),
        ({"runtime_top_k": 1}, False),
        ({"runtime_top_p": 0.0}, False),
        ({"runtime_top_k": 0, "runtime_top_p": 0.1}, True),
    ],
    ids=str,
)
def test_two_answers_differ_only_with_sampling(options, samples):
    model = ChatModel(None, None, 9, 9, {"temperature": 0.6, **options})
    assert model.samples is samples


def test_what_is_refused_is_one_sentence_and_the_rest_is_answered(chat):
    lines = ["/fork 1 + 1 =", "/nope", "1 " * 600, "1 " * 256, "17 + 25 ="]
    code, out, err = chat("\n".join(lines), *GREEDY)
    assert (code, out) == (1, " 42\n")
    same, unknown, long, full = err.splitlines()
    assert same.startswith("gptmanager: two answers would be the same without sampling")
    assert unknown == "gptmanager: unknown command '/nope': /help lists the commands"
    assert long == (
        "gptmanager: the conversation has 1,200 tokens with this message, and must have at most "
        "511 to leave room for an answer: shorten the message, or begin a new conversation with "
        "/clear"
    )
    assert full == long.replace("1,200", "512")
    code, out, err = chat("/fork")
    assert (code, out) == (1, "")
    assert err == "gptmanager: /fork needs a message, because none has been answered yet\n"


def test_an_answer_ends_where_the_context_ends(chat, endless, monkeypatch):
    reports = []
    monkeypatch.setattr(PipedView, "report", lambda _, text: reports.append(text))
    options = ("--max-seq-len", 100, "--max-new-tokens", 1000)
    code, out, _ = chat("x" * 90 + "\nagain", *GREEDY, *options, model=endless)
    assert code == 1 and out.count("\n") >= 1
    _, short, _ = chat("x" * 90, *GREEDY, "--max-new-tokens", 3, model=endless)
    assert out.startswith(short.rstrip("\n"))
    assert reports[0].endswith("because the context is full: /clear begins a new conversation")
    assert reports[-1].endswith("cut off: --max-new-tokens allows longer answers")


def test_stop_texts_end_answers(chat):
    assert chat("17 + 25 =", *GREEDY, "--stop", "2")[:2] == (0, " 4\n")


def test_options_are_those_of_the_requests(chat, tmp_path):
    """One of the checkpoint's own replaces all defaults, and one that is given any of them."""
    lines = "abc def\n" * 3
    sampled = chat(lines, "--seed", 1)
    assert sampled != chat(lines, "--seed", 2)
    assert sampled == chat(lines, "--seed", 1, "--top-p", 0.9, "--temperature", 0.6)
    assert sampled != chat(lines, "--seed", 1, "--repetition-penalty", 1)
    assert chat(lines, "--top-k", 1) == chat(lines, *GREEDY)

    for file in TINY_LLAMA.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((TINY_LLAMA / "generation_config.json").read_text())
    generation = tmp_path / "generation_config.json"
    for own in ({"do_sample": False, "temperature": 0.6}, {"top_k": 1}):
        generation.unlink()
        generation.write_text(json.dumps({**config, **own}))
        greedy = ("--temperature", "0", "--repetition-penalty", "1")
        assert chat(lines, model=tmp_path) == chat(lines, *greedy)


def test_a_model_without_a_template_is_refused(chat, tmp_path):
    folder = save_text_checkpoint(tmp_path / "text")
    code, out, err = chat("hello", model=folder)
    assert (code, out) == (2, "")
    assert err == (
        f"gptmanager: {folder} has no chat template: pass one with --chat-template FILE, or "
        "continue texts with `gptmanager run --prompt`\n"
    )
    template = tmp_path / "template.jinja"
    template.write_text("{{ raise_exception('only users may speak') }}")
    code, out, err = chat("hello", "--chat-template", template, model=folder)
    assert (code, out) == (1, "")
    assert err == "gptmanager: messages: the chat template: only users may speak\n"
    assert chat("hello", "--chat-template", tmp_path / "none", model=folder)[0] == 2
    too_long = "x" * 5000
    assert chat("hello", "--stop", too_long, model=folder)[0] == 1  # the request is refused


@pytest.mark.parametrize("lacks_tokenizer", [False, True])
def test_a_missing_shard_is_named_before_what_else_is_missing(chat, tmp_path, lacks_tokenizer):
    folder = save_text_checkpoint(tmp_path / "text", with_tokenizer=not lacks_tokenizer)
    whole = folder / "model.safetensors"
    with safe_open(whole, framework="pt") as tensors:
        names = list(tensors.keys())
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    whole.rename(folder / shards[0])
    index = {"weight_map": dict.fromkeys(names, shards[0]) | {names[-1]: shards[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    code, out, err = chat("hello", model=folder)
    assert (code, out) == (2, "")
    assert err == f"gptmanager: {folder / shards[1]} does not exist\n"


def test_wrong_bytes_and_names_of_control_tokens_are_plain_text(chat, tmp_path):
    file = tmp_path / "chat.json"
    text = b"\xff<|endoftext|>\r\n/save " + os.fsencode(file)
    code, _, err = chat(text, "--max-new-tokens", 2)
    assert code == 0 and "3 messages" not in err
    question = json.loads(file.read_bytes())["messages"][0]["content"]
    assert question == "\N{REPLACEMENT CHARACTER}<|endoftext|>"


def test_a_home_folder_that_is_unknown(chat):
    code, _, err = chat("/save ~nobody-has-this-name/chat.json", "--max-new-tokens", 2)
    assert code == 1 and "~nobody-has-this-name/chat.json" in err and err.count("\n") == 1


def test_a_closed_standard_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", None)
    assert cli.main(["chat", "--model", str(TINY_LLAMA)]) == 2
    assert capsys.readouterr().err.startswith("gptmanager: the standard input is closed")


# On a terminal -----------------------------------------------------------------------------------


def test_a_chat_on_a_terminal(tmp_path):
    options = ("--model", TINY_LLAMA, *GREEDY)
    with pseudo_terminal("chat", *options, folder=tmp_path) as terminal:
        # It says what it loads, and how to begin
        begin = terminal.wait_for(">>> ")
        assert "loading tiny_llama" in begin and "a context of 512 tokens" in begin
        assert "/help lists the commands" in begin

        # An answer follows its question, with figures
        terminal.enter("17 + 25 =")
        shown = terminal.wait_for(">>> ")
        assert "17 + 25 =\n 42\n" in shown
        assert re.search("\n4 tokens, [0-9.,]+ tokens/s, context 11 of 512\n", shown)

        # Messages have several lines by a backslash, by quotation marks, or as they are pasted
        for keys in (
            "one\\" + ENTER + "two" + ENTER,
            '"""one' + ENTER + 'two"""' + ENTER,
            PASTE.format("one\ntwo") + ENTER,
        ):
            terminal.press(keys)
            terminal.wait_for("context .*\n>>> ")
        terminal.enter("/save chat.json")
        terminal.wait_for("8 messages are in chat.json\n>>> ")
        messages = json.loads((tmp_path / "chat.json").read_bytes())["messages"]
        assert [message["content"] for message in messages[2::2]] == 3 * ["one\ntwo"]

        # A refusal does not end it, and Ctrl-D does
        terminal.enter("1 " * 600)
        terminal.wait_for("the conversation has .* begin a new conversation with /clear\n>>> ")
        terminal.press(CTRL_D)
        assert terminal.end() == 0


def test_an_interrupt_stops_an_answer_and_not_the_chat(endless):
    options = ("--model", endless, *GREEDY, "--max-new-tokens", 200_000, "--repetition-penalty", 1)
    with pseudo_terminal("chat", *options) as terminal:
        terminal.wait_for(">>> ")

        # When an answer is interrupted
        terminal.enter("hello")
        terminal.wait_for("hello\n[^\n]")
        terminal.press("typed ahead" + CTRL_C)
        terminal.wait_for("tokens/s, context .*, stopped\n>>> ")

        # Then the next message is answered, by the process that renders the prompts as before
        terminal.interrupt_prompt()
        terminal.wait_for("Ctrl-C again, or Ctrl-D, ends the chat\n>>> ")
        terminal.enter("/fork hello")
        terminal.wait_for("two answers would be the same")
        terminal.wait_for(">>> ")
        terminal.enter("again")
        terminal.wait_for("again\n[^\n]")
        terminal.press(CTRL_C)
        terminal.wait_for("stopped\n>>> ")

        # And a thought is stopped like an answer
        terminal.enter("think")
        terminal.wait_for("think\nthinking\n[^\n]")
        terminal.press(CTRL_C)
        told = "stopped before the answer: the message is not part of the conversation"
        terminal.wait_for(f"\n{told}\n>>> ")

        # And two in a row end the chat where no answer is generated
        terminal.interrupt_prompt()
        terminal.wait_for("ends the chat\n>>> ")
        terminal.interrupt_prompt()
        assert terminal.end() == 0
        assert "Traceback" not in terminal.text and "killed" not in terminal.text


def test_an_interrupt_stops_an_answer_and_the_second_one_the_chat():
    """Afterwards an interrupt is that of the chat again."""
    before, stops = signal.getsignal(signal.SIGINT), []
    with on_interrupt(lambda: stops.append(1)):
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert stops == [1] and signal.getsignal(signal.SIGINT) is before


def test_answers_share_the_width_of_the_terminal():
    file = io.StringIO()
    Console(file=file, width=40).print(_columns([Text("a" * 18), Text("b" * 19)], 40, 24))
    assert file.getvalue().split() == ["a" * 18, "b" * 18, "b"]


@pytest.mark.slow
def test_two_answers_appear_next_to_each_other(endless):
    options = ("--model", endless, "--temperature", 2, "--max-new-tokens", 1200)
    with pseudo_terminal("chat", *options, columns=60) as terminal:
        terminal.wait_for(">>> ")
        terminal.enter("/fork hello")
        terminal.wait_for("answer 1: .* tokens")
        shown = terminal.wait_for("answer 1 continues; /pick 2 chooses the other\n>>> ")
        assert "answer 2: " in shown
        terminal.enter("/bye")
        assert terminal.end() == 0
