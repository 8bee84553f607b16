"""A host may make its processors, then fork, and run a manager in the child."""

import contextlib
import os
import signal
import threading
from itertools import count

import pytest
from fuzz import STRIDE
from interrupting import handled

from gptmanager.callbacks.processors.banned_texts import BannedTexts
from gptmanager.callbacks.processors.guided_decoding import GuidedDecoding
from gptmanager.callbacks.text.chat_template import ChatTemplate

pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def forked(function):
    """Call in a fork, and return whether it has returned a true value; a hang is ended."""
    child = os.fork()
    if not child:
        signal.setitimer(signal.ITIMER_REAL, 40)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@contextlib.contextmanager
def held(lock):
    """Hold a lock in a thread, which does not exist in a fork."""
    is_held, is_free = threading.Event(), threading.Event()

    def hold():
        with lock:
            is_held.set()
            is_free.wait(50)

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    is_held.wait(50)
    yield
    is_free.set()
    holder.join()


def forked_in_a_thread(function):
    """The calling thread does not exist in the fork."""
    found = []
    thread = threading.Thread(target=lambda: found.append(forked(function)))
    thread.start()
    thread.join()
    return found[0]


def test_a_fork_at_any_moment_leaves_grammars_that_can_be_made(tokenizer):
    guided = GuidedDecoding(tokenizer, [0])
    guided.regex("a").compiled.result()
    found = []

    def fork():
        found.append(forked_in_a_thread(lambda: guided.regex("b")))

    for point in count(step=STRIDE):
        if not handled(lambda: guided.regex("a"), point, fork):
            break
        assert found.pop(), point
    assert point > 10


def test_a_grammar_that_a_fork_inherits_is_compiled_there(tokenizer, monkeypatch):
    guided, may_compile = GuidedDecoding(tokenizer, [0]), threading.Event()
    compile_ = guided._compile
    monkeypatch.setattr(
        guided, "_compile", lambda *given: may_compile.wait(40) and compile_(*given)
    )
    grammar = guided.regex("a")  # its thread waits here, and would never run in the fork

    def is_compiled():
        may_compile.set()
        return grammar.compiled.result(30) and grammar.compiled is guided.regex("a").compiled

    assert forked(is_compiled)
    may_compile.set()
    assert grammar.compiled.result(30)


def test_banned_words_that_a_fork_inherits_are_looked_up_there(tokenizer):
    banned = BannedTexts(tokenizer)
    inherited = banned.bind(["red"])
    inherited.prepare("cpu").result(30)  # its thread does not exist in the fork
    before = list(inherited.banned_after([]))

    def works():
        others = banned.bind(["blue"]).banned_after([])
        return len(others) and list(inherited.banned_after([])) == before

    with held(banned._lists.get()._lock):  # another request is being bound
        assert forked(works)
    assert inherited.prepare("cpu") is banned.bind(["red"]).prepare("cpu")


def test_a_fork_renders_chats_even_if_another_thread_renders_one():
    messages = [{"role": "user", "content": "Hello"}]
    with ChatTemplate.of_folder("examples/tiny_llama") as template:
        expected = template.render(messages)
        with held(template._own.get()[0]):
            assert forked(lambda: template.render(messages) == expected)
        assert template.render(messages) == expected
