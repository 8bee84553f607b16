import os
import signal
import threading
from queue import Empty, SimpleQueue

import pytest
from checkpoints import CONFIGS, random_model

from gptmanager import OptionalParams
from gptmanager.callbacks import generate, start
from gptmanager.errors import ConfigError, InvalidRequestError, StepError
from gptmanager.testing import ScriptedModel


def counting(**keywords):
    return ScriptedModel(lambda history: (history[-1] + 1) % 300, vocab_size=300, **keywords)


def test_completions_come_in_the_order_of_the_prompts():
    prompts = [[10], [20, 21], [30]]

    assert generate(counting(), prompts, 3) == [[11, 12, 13], [22, 23, 24], [31, 32, 33]]
    assert generate(counting(), [10, 11], 3) == [12, 13, 14]
    assert generate(counting(), [], 3) == []


def test_text_for_text(tokenizer):
    ids = tokenizer.encode("once upon a time").ids
    script = {tuple(ids[:n]): ids[n] for n in range(1, len(ids))}
    model = ScriptedModel(lambda history: script.get(tuple(history), 0), vocab_size=300)
    prompt = tokenizer.decode(ids[:1])

    assert prompt + generate(model, prompt, 9, tokenizer=tokenizer, end_id=0) == "once upon a time"
    assert generate(model, [prompt], 9, tokenizer=tokenizer, end_id=0) == [
        "once upon a time".removeprefix(prompt)
    ]


def test_texts_and_ids_may_be_mixed(tokenizer, checkpoint):
    letter = tokenizer.token_to_id("A")

    completions = generate(counting(), ["A", [letter]], 2, tokenizer=checkpoint)

    assert completions == [tokenizer.decode([letter + 1, letter + 2]), [letter + 1, letter + 2]]


def test_a_completion_has_at_most_64_tokens_by_default():
    assert generate(counting(), [10]) == [*range(11, 75)]


def test_sampling_and_options_reach_the_manager():
    params = OptionalParams(exclude_input_in_output=True, max_batch_size=1)

    completions = generate(
        counting(), [[10], [20]], 9, optional_params=params, stop_words_list=[[12, 13]], end_id=22
    )

    assert completions == [[11], [21]]


@pytest.mark.parametrize("beams", [{}, {"beam_width": 3}])
def test_several_texts_of_each_prompt(checkpoint, tokenizer, beams):
    def several(prompts, **options):
        model = ScriptedModel(lambda history: (history[-1] + 1) % 300, vocab_size=300)
        return generate(model, prompts, 2, num_return_sequences=2, **beams, **options)

    texts = several([10, 11])
    assert len(texts) == 2 and texts[0] == [12, 13] and all(len(text) == 2 for text in texts)
    batch = several([[10], [20]])
    assert [len(texts) for texts in batch] == [2, 2]
    assert (batch[0][0], batch[1][0]) == ([11, 12], [21, 22])
    letter = tokenizer.token_to_id("A")
    read = several("A", tokenizer=tokenizer)
    assert len(read) == 2 and read[0] == tokenizer.decode([letter + 1, letter + 2])


def test_one_text_that_is_asked_for_is_a_list_too():
    assert generate(counting(), [10], 2, num_return_sequences=1) == [[11, 12]]


@pytest.mark.parametrize("count", [0, -1, True, 1.5, "2", [2]])
def test_a_number_of_texts_that_cannot_be(count):
    with pytest.raises(ConfigError, match="num_return_sequences = .* must be an integer of at"):
        generate(counting(), [10], 2, num_return_sequences=count)


def test_more_texts_than_beams_are_refused():
    with pytest.raises(InvalidRequestError, match="num_return_sequences = 3 exceeds beam_width"):
        generate(counting(), [10], 2, num_return_sequences=3, beam_width=2)


def test_sampled_texts_differ():
    config = CONFIGS["llama"]
    model = (config, random_model(config).state_dict())
    told = []
    params = OptionalParams(on_progress=lambda what, done, total: told.append(what))
    texts = generate(
        model, [10], 8, num_return_sequences=4, temperature=1.0, optional_params=params
    )
    assert len(set(map(tuple, texts))) == 4 and "weights" in told


@pytest.mark.parametrize("prompts", [5, None, b"once"])
def test_an_invalid_prompt_is_named(prompts):
    with pytest.raises(TypeError, match="prompts must be texts or lists of token ids, got "):
        generate(counting(), prompts, 3)
    with pytest.raises(ConfigError, match="optional_params = {'seed': 3}, expected OptionalParams"):
        generate(counting(), [1], 3, optional_params={"seed": 3})


def test_text_without_a_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="need a tokenizer"):
        generate(counting(), "once", 3)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        generate(str(tmp_path), "once", 3)


def test_a_folder_without_a_checkpoint_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError):
        generate(tmp_path, [1], 3)


class Late(SimpleQueue):
    """Is empty when it is first asked."""

    empties = 3

    def get(self, timeout):
        if self.empties:
            self.empties -= 1
            raise Empty
        return super().get(timeout=timeout)


def test_an_error_names_its_prompt(monkeypatch):
    monkeypatch.setattr(start, "SimpleQueue", Late)
    with pytest.raises(InvalidRequestError, match=r"^prompts\[1\]: .*input_ids"):
        generate(counting(), [[1], [], [2]], 3)


def test_a_failed_model_leaves_no_caller_waiting():
    def fail(history):
        raise RuntimeError("boom")

    with pytest.raises(StepError, match="boom"):
        generate(ScriptedModel(fail), [[1], [2]], 3)


def test_an_interrupt_aborts_and_leaves_no_thread():
    # Given a long generation
    before = set(threading.enumerate())

    def interrupt(history):
        if history == [1] * 5:
            os.kill(os.getpid(), signal.SIGINT)
        return 1

    # When Ctrl-C is pressed in the midst of it
    with pytest.raises(KeyboardInterrupt):
        generate(ScriptedModel(interrupt), [[1], [2]], 2000)

    # Then nothing of it is left
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(("progress", "is_shown"), [(True, True), (False, False), (None, False)])
def test_a_bar_shows_what_takes_long(monkeypatch, capsys, progress, is_shown):
    # Given a patience that is over at once, and no terminal
    monkeypatch.setattr(start, "_PATIENCE_S", 0.0)
    before = set(threading.enumerate())

    generate(counting(), [[1], [2]], 3, progress=progress)

    assert ("prompt" in capsys.readouterr().err) == is_shown
    assert set(threading.enumerate()) <= before


def test_what_is_fast_shows_no_bar(monkeypatch, capsys):
    monkeypatch.setattr(start, "_PATIENCE_S", 1000.0)  # whatever the machine does besides

    generate(counting(), [[1], [2]], 3, progress=True)

    assert capsys.readouterr().err == ""
