"""Messages of a chat: what is asked, kept, chosen and saved, and how lines become messages."""

import json

import pytest

from gptmanager.commands.chat.conversation import Answer, Conversation
from gptmanager.commands.chat.message_lines import Entry, read_message
from gptmanager.commands.chat.slash_commands import EndOfChat, run_command
from gptmanager.errors import ConfigError


def said(conversation):
    return [(message["role"], message["content"]) for message in conversation.messages]


def test_a_question_is_part_of_the_chat_once_it_is_answered():
    chat = Conversation("Be brief.")
    assert chat.asking("one?") == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one?"},
    ]
    assert said(chat) == [("system", "Be brief.")] and chat.last_question is None
    chat.add("one?", [Answer("1")])
    chat.add("two?", [Answer("2"), Answer("zwei")])
    assert said(chat)[1:] == [
        ("user", "one?"), ("assistant", "1"), ("user", "two?"), ("assistant", "2"),
    ]  # fmt: skip
    assert chat.last_question == "two?"


def test_a_question_may_be_asked_again():
    chat = Conversation()
    chat.add("one?", [Answer("1")])
    chat.add("two?", [Answer("3")])
    asked = chat.asking("two?", again=True)
    assert [message["content"] for message in asked] == ["one?", "1", "two?"]
    assert len(chat.messages) == 4  # until there are answers
    chat.add("two?", [Answer("2"), Answer("zwei")], again=True)
    assert [content for _, content in said(chat)] == ["one?", "1", "two?", "2"]
    chat.pick(2)
    assert [content for _, content in said(chat)] == ["one?", "1", "two?", "zwei"]
    chat.pick(1)
    assert said(chat)[-1] == ("assistant", "2")


def test_the_thoughts_of_an_answer_are_a_field_of_its_message():
    chat = Conversation()
    chat.add("one?", [Answer("1", "easy"), Answer("eins")])
    message = {"role": "assistant", "content": "1", "reasoning_content": "easy"}
    assert chat.messages[-1] == message
    chat.pick(2)
    assert chat.messages[-1] == {"role": "assistant", "content": "eins"}


def test_only_answers_to_the_last_question_can_be_chosen():
    chat = Conversation()
    with pytest.raises(
        ConfigError, match="^no question has been answered yet: ask a question first$"
    ):
        chat.pick(1)
    chat.add("one?", [Answer("1")])
    with pytest.raises(ConfigError, match="^the number of the answer must be 1 to 1, got 2$"):
        chat.pick(2)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["hello"], Entry("hello")),
        (["/clear"], Entry("/clear", True)),
        (["one\\", "two\\", "three"], Entry("one\ntwo\nthree")),
        (["one\\"], Entry("one")),  # the end of a pipe
        (['"""one', "", '  two"""'], Entry("one\n\n  two")),
        (['"""', "/clear", '"""'], Entry("/clear")),
        (['"""one line"""'], Entry("one line")),
        (['"""', "no end", "of it"], Entry("no end\nof it")),
        (["/system one\\", "two"], Entry("/system one\ntwo", True)),
        (["a pasted text\n/clear"], Entry("a pasted text\n/clear")),
    ],
)
def test_lines_become_a_message(lines, expected):
    rest = iter(lines)

    def read_line(continues):
        assert continues == (len(lines) - rest.__length_hint__() > 0)
        try:
            return next(rest)
        except StopIteration:
            raise EOFError from None

    assert read_message(read_line) == expected
    assert next(rest, None) is None


def test_commands_change_the_conversation(tmp_path):
    chat = Conversation()
    assert run_command(chat, "/system") == "no system prompt is set"
    assert run_command(chat, "/system  Be brief. ") == "the system prompt is set"
    assert run_command(chat, "/system") == "Be brief."
    chat.add("one?", [Answer("1"), Answer("eins")])
    assert run_command(chat, "/pick 2") == "answer 2 continues"
    file = tmp_path / "chat of today.json"
    assert run_command(chat, f"/save {file}") == f"3 messages are in {file}"
    assert json.loads(file.read_bytes()) == {"messages": chat.messages}
    assert run_command(chat, "/clear") == "a new conversation begins"
    assert said(chat) == [("system", "Be brief.")]
    assert run_command(chat, '/system ""') == "the system prompt is removed"
    assert chat.messages == []
    for command in ("/bye", "/exit", "/quit"):
        with pytest.raises(EndOfChat):
            run_command(chat, command)


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("/nope", "unknown command '/nope': /help lists the commands"),
        ("/", "unknown command '/': /help lists the commands"),
        ("/pick", "no question has been answered yet: ask a question first"),
        ("/pick two", "no question has been answered yet: ask a question first"),
        ("/save", "/save needs the name of a file: /save chat.json"),
    ],
)
def test_a_wrong_command_changes_nothing(command, error):
    chat = Conversation()
    with pytest.raises(ConfigError) as caught:
        run_command(chat, command)
    assert str(caught.value) == error and chat.messages == []


def test_only_own_files_are_replaced(tmp_path):
    chat, file = Conversation("x"), tmp_path / "chat.json"
    chat.save(file)
    chat.system = "y"
    chat.save(file)
    assert json.loads(file.read_bytes()) == {"messages": [{"role": "system", "content": "y"}]}
    with pytest.raises(ConfigError, match="exists: choose another name$"):
        Conversation("z").save(file)
    assert b'"y"' in file.read_bytes()
    for path in (tmp_path / "none" / "chat.json", tmp_path / "x\0"):
        with pytest.raises(ConfigError, match="cannot be written: "):
            chat.save(path)
