"""Requests and results as JSON lines."""

from __future__ import annotations

import io
import json
import math
import os
import re
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from family_configs import FAMILY_CONFIGS
from interrupting import interrupted
from safetensors.torch import save_file
from text_checkpoint import byte_tokenizer, save_text_checkpoint

from gptmanager import FinishReason
from gptmanager.callbacks import GenerationResult, load_tokenizer
from gptmanager.commands.run.chat_prompts import ChatPrompts
from gptmanager.commands.run.line_fields import _ALIASES, _NAMES
from gptmanager.commands.run.requests_file import read_file, read_requests
from gptmanager.commands.run.results_file import Results, new_file, result_line
from gptmanager.errors import CapacityError, ConfigError, GptManagerError
from gptmanager.request.adapter_modules import LORA_MODULE_IDS

TOKENIZER = byte_tokenizer()
TINY_LLAMA = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"


def ids(text):
    return TOKENIZER.encode(text).ids


def read(*lines, tokenizer=TOKENIZER):
    encoded = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
    return list(read_requests(encoded, tokenizer, defaults={"request_output_len": 5}))


def tensors(line):
    return {name: np.asarray(value).tolist() for name, value in line.request.tensors.items()}


def test_a_line_becomes_a_request():
    (line,) = read(
        {"request_id": 9, "prompt": "ab", "max_new_tokens": 3, "temperature": 0.5, "priority": 0.75}
    )

    assert (line.number, line.request_id, line.prompt, line.error) == (1, 9, "ab", None)
    assert (line.request.request_id, line.request.priority) == (9, 0.75)
    assert line.request.is_streaming
    assert tensors(line) == {
        "input_ids": ids("ab"), "request_output_len": 3, "temperature": 0.5,
    }  # fmt: skip


def test_a_byte_order_mark_at_the_start_is_skipped():
    first, second = read(b'\xef\xbb\xbf{"prompt": "a"}', b'\xef\xbb\xbf{"prompt": "a"}')
    assert first.error is None and first.prompt == "a"
    assert "invalid JSON" in str(second.error)


def test_what_a_line_leaves_out():
    first, second = read({"input_ids": [1, 2]}, b"  \n", {"prompt": "a", "streaming": False})

    # the id is the number of the line, empty ones counted
    assert (first.request_id, second.request_id, second.number) == (1, 3, 3)
    assert tensors(first) == {"input_ids": [1, 2], "request_output_len": 5}
    assert first.prompt is None
    assert not second.request.is_streaming


@pytest.mark.parametrize(
    ("name", "tensor", "value"),
    [
        ("top_k", "runtime_top_k", 4),
        ("runtime_top_k", "runtime_top_k", 4),
        ("top_p", "runtime_top_p", 0.5),
        ("min_p", "runtime_min_p", 0.1),
        ("request_output_len", "request_output_len", 8),
        ("max_new_tokens", "request_output_len", 8),
        ("length_penalty", "len_penalty", 1.0),
        ("no_repeat_ngram_size", "noRepeatNgramSize", 2),
        ("noRepeatNgramSize", "noRepeatNgramSize", 2),
        ("random_seed", "random_seed", 2**63 + 1),
        ("end_id", "end_id", 3),
    ],
)
def test_inputs_by_their_names(name, tensor, value):
    (line,) = read({"input_ids": [1], name: value})
    assert tensors(line)[tensor] == value


def test_keywords_of_a_request_are_fields():
    (line,) = read({"input_ids": [1], "cache_salt": "a", "retention_priority": 80})
    assert (line.request.cache_salt, line.request.retention_priority) == ("a", 80)


def test_null_means_not_given():
    (line,) = read({"prompt": None, "input_ids": [1], "end_id": None, "streaming": None})
    assert tensors(line).keys() == {"input_ids", "request_output_len"}
    assert line.request.is_streaming


@pytest.mark.parametrize("name", ["streaming", "is_streaming"])
def test_both_names_of_streaming(name):
    (line,) = read({"input_ids": [1], name: False})
    assert not line.request.is_streaming


@pytest.mark.parametrize(
    ("fields", "stop"),
    [
        ({"stop": "ab"}, ("ab",)),
        ({"stop": ["ab", "c"]}, ("ab", "c")),
        ({"stop": []}, None),
        ({"stop": None}, None),
        ({}, None),
    ],
)
def test_stop_texts(fields, stop):
    (line,) = read({"prompt": "a", **fields})
    assert line.stop == stop
    assert "stop_words_list" not in tensors(line)


def test_stop_words_are_tokens():
    (line,) = read({"prompt": "a", "stop": "b", "stop_words_list": [ids("xy"), ids("z")]})
    tokens, ends = tensors(line)["stop_words_list"][0]
    assert tokens == ids("xyz") and ends[:2] == [len(ids("xy")), len(ids("xyz"))]


USER = {"role": "user", "content": "17 + 25 ="}


@pytest.fixture(scope="module")
def chats():
    found = ChatPrompts(TINY_LLAMA)
    found.render([USER])  # starts the process of the template, whichever tests run
    yield found
    found.close()
    with pytest.raises(ValueError):  # the process of the template has ended
        found.render([USER])


def read_chat(messages, chats):
    lines = [json.dumps({"messages": messages}).encode()]
    (line,) = read_requests(lines, TOKENIZER, defaults={"request_output_len": 5}, chats=chats)
    return line


def test_messages_are_rendered_by_the_template_of_the_model(chats):
    line = read_chat([{"role": "system", "content": "Add."}, USER], chats)
    expected = load_tokenizer(TINY_LLAMA).encode("Add.\n17 + 25 =", add_special_tokens=False).ids
    assert tensors(line)["input_ids"] == expected and line.prompt is None
    called = {"role": "assistant", "tool_calls": [{"type": "function"}]}
    assert "InvalidRequestError" not in str(read_chat([USER, called], chats).error)


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ("hello", "messages = 'hello' must be a list of at least one message"),
        ([], "messages = [] must be a list of at least one message"),
        ([USER, 7], "messages[1] = 7 must be an object"),
        ([{"content": "a"}], "messages[0].role = None must be a string"),
        ([USER, {**USER, "role": 1}], "messages[1].role = 1 must be a string"),
        ([USER, {"role": "user"}], "messages[1].content = None must be a string"),
        ([{**USER, "content": ["a"]}], "messages[0].content = ['a'] must be a string"),
    ],
)
def test_wrong_messages_are_named(messages, error, chats):
    assert str(read_chat(messages, chats).error) == f"line 1: {error}"


def test_messages_for_a_model_without_a_template(tmp_path):
    line = read_chat([USER], ChatPrompts(save_text_checkpoint(tmp_path / "text")))
    assert re.fullmatch("line 1: messages: .*text has no chat template: .*", str(line.error))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (b'{"prompt": "a"', "invalid JSON"),
        (b"\xff", "invalid JSON"),
        (b"[1]", "not a JSON object"),
        (b"3", "not a JSON object"),
        ({}, "neither prompt nor input_ids"),
        ({"prompt": "a", "input_ids": [1]}, "both prompt and input_ids"),
        ({"messages": [], "input_ids": [1]}, "both messages and input_ids"),
        (
            {"messages": [{"role": "user", "content": "a"}]},
            "messages can only be used with a model's chat",
        ),
        ({"prompt": 7}, "prompt must be a string, got 7"),
        ({"prompt": "a", "max_tokens": 7}, "unknown field 'max_tokens'"),
        ({"prompt": "a", "logits_post_processor": 7}, "unknown field 'logits_post_processor'"),
        ({"prompt": "a", "tensors": {}}, "unknown field 'tensors'"),
        ({"prompt": "a", "top_k": 1, "runtime_top_k": 1}, "top_k and runtime_top_k are the same"),
        ({"prompt": "a", "streaming": "yes"}, "streaming must be true or false, got 'yes'"),
        ({"prompt": "a", "is_streaming": 1}, "is_streaming must be true or false, got 1"),
        ({"input_ids": "abc"}, " must be a list of token ids, got "),
        ({"input_ids": [[1, 2]]}, " must be a list of token ids, got "),
        ({"input_ids": [1, 2.5]}, " must be a list of token ids, got "),
        ({"input_ids": [True]}, " must be a list of token ids, got "),
        ({"input_ids": [-1]}, " must be a list of token ids, got "),
        ({"input_ids": [2**31]}, " must be a list of token ids, got "),
        ({"prompt": "a", "stop": 7}, "stop must be a string or a list of strings, got 7"),
        ({"prompt": "a", "stop": [7]}, "stop must be a string or a list of strings, got [7]"),
        ({"prompt": "a", "stop": ["b", ""]}, "stop[1] has 0 characters, it must have 1 to 4096"),
        ({"prompt": "a", "stop_words_list": [7]}, "must be a list of lists of token ids, got [7]"),
        ({"prompt": "a", "stop_words_list": 7}, "must be a list of lists of token ids, got 7"),
        ({"prompt": "a", "request_id": "x"}, "request_id must be an integer"),
        ({"prompt": "a", "request_id": True}, "request_id must be an integer"),
        ({"prompt": "a", "request_id": -1}, "request_id = -1 is outside"),
        (b"\xff\xfe{\0", "invalid JSON: not UTF-8"),
    ],
)
def test_an_error_names_the_line_and_what_is_wrong(text, error):
    good, bad, other = read({"prompt": "a"}, text, {"prompt": "b"})

    assert good.request is not None and other.request is not None
    assert bad.request is None and bad.number == 2
    assert str(bad.error).startswith("line 2: ")
    assert error in str(bad.error)


JSON_VALUES = {
    "integer": [3],
    "number": [3, 0.5],
    "flag": [True, False],
    "text": ["a"],
    "ids": [[3, 4]],
    "numbers": [[0.5, 1]],
    "lists of ids": [[[3], [4, 5]]],
    "lists of numbers": [[[0.5]], [[0.5], [1]]],
    "other": [{}, {"a": 1}, [None], [True], ["a"], [[True]], [["a"]], [[[[1]]]], [[]], [{}]],
}
# the kind of JSON that each field of a line takes
TAKEN = {
    **dict.fromkeys(
        (
            "max_new_tokens", "request_output_len", "pad_id", "beam_width", "top_k",
            "runtime_top_k", "min_length", "early_stopping", "noRepeatNgramSize",
            "no_repeat_ngram_size", "random_seed", "num_return_sequences", "prompt_vocab_size",
            "lora_task_id", "client_id", "retention_priority", "request_id", "input_lengths",
            "num_top_log_probs", "num_prompt_log_probs",
        ),
        ("integer",),
    ),
    **dict.fromkeys(
        (
            "temperature", "top_p", "runtime_top_p", "min_p", "runtime_min_p", "len_penalty",
            "length_penalty", "repetition_penalty", "presence_penalty", "frequency_penalty",
            "priority", "deadline_s", "queue_timeout_s",
        ),
        ("integer", "number"),
    ),
    **dict.fromkeys(
        (
            "streaming", "is_streaming", "return_log_probs", "return_context_logits",
            "return_generation_logits", "include_stop_in_output",
        ),
        ("flag",),
    ),
    **dict.fromkeys(("input_ids", "draft_input_ids", "position_ids"), ("ids",)),
    **dict.fromkeys(("bad_words_list", "stop_words_list"), ("lists of ids",)),
    **dict.fromkeys(
        (
            "embedding_bias", "prompt_embedding_table", "draft_logits", "lora_weights",
            "lora_config",
        ),
        ("ids", "numbers", "lists of ids", "lists of numbers"),
    ),
    "cache_salt": ("text", "integer"),
    "end_id": ("integer", "ids"),
    "prompt": ("text",),
    "lora": ("text",),
    "stop": ("text",),
}  # fmt: skip


def test_every_field_of_a_line_has_a_kind():
    own_tests = {"messages"}
    assert {_ALIASES.get(name, name) for name in TAKEN} == _NAMES - own_tests


@pytest.mark.parametrize("name", TAKEN)
def test_a_field_takes_json_of_its_kind_and_no_other(name):
    for kind, values in JSON_VALUES.items():
        for value in values:
            if name == "stop" and value == ["a"]:
                continue  # a list of texts
            if name == "lora" and value == "a":
                continue  # there is no such folder
            if name.endswith("words_list") and value == [[]]:
                continue  # a word without tokens: admission says so
            is_taken = kind in TAKEN[name] or (
                kind == "number" and value == 3 and "integer" in TAKEN[name]
            )
            base = {} if name in ("prompt", "input_ids") else {"prompt": "a"}
            (line,) = read({**base, name: value})
            if is_taken:
                assert line.error is None, (value, line.error)
                continue
            text = str(line.error)
            assert line.error is not None, value
            assert re.search(rf"line 1: ({name}|\w+) must be .*, got |request_id must be", text)
            assert name in text or name == "request_id"


def test_a_long_value_is_cut_in_its_error():
    (line,) = read({"prompt": "a", "temperature": "x" * 10**6})
    assert len(str(line.error)) < 400


def test_the_id_of_a_wrong_line_is_shown_if_it_can_be():
    shown = read({"request_id": 7}, {"request_id": "x", "prompt": "a"}, {"prompt": "b", "x": 1})
    assert [line.request_id for line in shown] == [7, None, 3]
    # what was asked is kept, so that a result can be told
    assert [line.prompt for line in read({"prompt": "b", "stop": 7})] == ["b"]


def test_a_second_use_of_an_id_is_refused():
    lines = read(
        {"request_id": 5, "prompt": "a"},
        {"request_id": 5, "prompt": "b"},
        {"request_id": 5, "prompt": "c"},
        {"prompt": "d"},
    )
    assert [line.request is not None for line in lines] == [True, False, False, True]
    assert str(lines[2].error) == "line 3: request_id = 5 is already used in line 1"


def test_a_wrong_line_does_not_take_its_id():
    lines = read({"request_id": 5}, {"request_id": 5, "prompt": "b"})
    assert [line.request is not None for line in lines] == [False, True]


def test_without_a_tokenizer_texts_are_refused():
    prompt, stop, good = read(
        {"prompt": "a"}, {"input_ids": [1], "stop": "b"}, {"input_ids": [1]}, tokenizer=None
    )
    assert "prompt is a text, but the model has no tokenizer" in str(prompt.error)
    assert "stop is a text, but the model has no tokenizer" in str(stop.error)
    assert good.request is not None


def test_a_file_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match=r"--requests .*nowhere\.jsonl: No such file"):
        read_file(str(tmp_path / "nowhere.jsonl"), None, defaults={"request_output_len": 1})
    with pytest.raises(ConfigError, match="Is a directory"):
        read_file(str(tmp_path), None, defaults={"request_output_len": 1})


def test_a_new_file_makes_its_folder_and_empties_what_was_there(tmp_path):
    path = tmp_path / "a" / "b" / "out.jsonl"
    for _ in range(2):
        with new_file("--output", path) as file:
            file.write(b"x")
    assert path.read_bytes() == b"x"

    (tmp_path / "plain").write_text("")
    with pytest.raises(ConfigError, match="--output .*plain/out.jsonl: "):
        new_file("--output", tmp_path / "plain" / "out.jsonl")


def generated(text, request_id=1, prompt="a"):
    metrics = {"queue_s": 0.5, "first_token_s": math.nan, "pauses": 2.0, "generated_tokens": 4.0}
    return GenerationResult(
        request_id, (tuple(ids(text)),), (FinishReason.LENGTH,), metrics, np.array(ids(prompt)), {}
    )


def test_a_result_line():
    (line,) = read({"request_id": 8, "prompt": "a"})
    result = result_line(line, generated("bc"), TOKENIZER)

    assert json.loads(json.dumps(result, default=str).replace("NaN", "null")) == {
        "line": 1,
        "request_id": 8,
        "prompt": "a",
        "text": "bc",
        "output_ids": ids("bc"),
        "finish_reason": "LENGTH",
        "metrics": {"queue_s": 0.5, "first_token_s": None, "pauses": 2, "generated_tokens": 4},
    }
    assert "text" not in result_line(line, generated("bc"), None)
    assert result_line(line, CapacityError("too long"), TOKENIZER) == {
        "line": 1, "request_id": 8, "prompt": "a", "error": "CapacityError: too long",
    }  # fmt: skip


def test_a_text_that_ends_within_a_character_shows_it():
    (line,) = read({"prompt": "a"})
    outcome = generated("é")
    cut = GenerationResult(
        1, (outcome.generated_ids[0][:1],), outcome.finish_reasons, {}, np.array(ids("a")), {}
    )
    assert result_line(line, cut, TOKENIZER)["text"] == "\N{REPLACEMENT CHARACTER}"


def test_results_are_written_in_the_order_of_the_lines_as_soon_as_they_can_be():
    lines = read({"prompt": "a"}, {"prompt": "b"}, {"prompt": 7}, {"prompt": "c"})
    file = io.BytesIO()
    results = Results(lines, TOKENIZER, file)

    def written():
        return [json.loads(line)["line"] for line in file.getvalue().splitlines()]

    results.add(lines[2], lines[2].error)
    results.add(lines[1], generated("x"))
    assert written() == []
    results.add(lines[0], generated("y"))
    assert written() == [1, 2, 3]


def test_an_interrupted_run_keeps_the_results_that_are_known():
    lines = read(*({"prompt": "a"} for _ in range(4)))
    file = io.BytesIO()
    results = Results(lines, TOKENIZER, file)
    results.add(lines[3], generated("x"))
    results.add(lines[0], generated("y"))
    results.close()

    assert [json.loads(line)["line"] for line in file.getvalue().splitlines()] == [1, 4]


def test_a_file_may_write_a_part_of_a_line():
    class PartialFile(io.BytesIO):
        def write(self, data):
            return super().write(data[:30])

    lines = read({"prompt": "a"}, {"prompt": "b"})
    file = PartialFile()
    results = Results(lines, TOKENIZER, file)
    for line in lines:
        results.add(line, generated("x"))
    assert [json.loads(line)["line"] for line in file.getvalue().splitlines()] == [1, 2]


def test_a_full_pipe_that_does_not_block_is_an_error():
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    lines = read({"prompt": "a"})
    with open(reader, "rb"), open(writer, "wb", buffering=0) as file:
        while file.write(bytes(1 << 16)):
            pass
        results = Results(lines, TOKENIZER, file)
        with pytest.raises(GptManagerError, match="--output .*could not complete without blocking"):
            results.add(lines[0], generated("x"))


@pytest.mark.parametrize("call", ["add", "close"])
def test_an_interrupt_at_any_point_neither_loses_nor_repeats_a_result(call):
    lines = read(*({"prompt": "a"} for _ in range(4)))
    outcomes = [generated(text) for text in "wxyz"]
    for point in count():
        file = io.BytesIO()
        results = Results(lines, TOKENIZER, file)
        results.add(lines[1], outcomes[1])
        results.add(lines[3], outcomes[3])
        if call == "close":
            results.add(lines[0], outcomes[0])
            is_reached = interrupted(results.close, point)
        else:
            is_reached = interrupted(lambda new=results: new.add(lines[0], outcomes[0]), point)
        if 1 not in results.by_number:
            results.add(lines[0], outcomes[0])
        results.close()
        found = [json.loads(line)["line"] for line in file.getvalue().splitlines()]
        assert found == [1, 2, 4], point
        if not is_reached:
            break
    assert point > 5


def test_lines_name_adapters_by_their_folders(tmp_path):
    for name, rank in (("a", 1), ("b", 2)):
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
        module = "base_model.model.model.layers.0.self_attn.q_proj"
        folder = tmp_path / name
        folder.mkdir()
        (folder / "adapter_config.json").write_text(json.dumps(config))
        weights = {"A": torch.ones(rank, 3), "B": torch.ones(4, rank)}
        save_file(
            {f"{module}.lora_{it}.weight": value for it, value in weights.items()},
            folder / "adapter_model.safetensors",
        )
    (tmp_path / "loop").symlink_to("loop")
    lines = [
        {"input_ids": [1], "lora": "a"},
        {"input_ids": [1], "lora": str(tmp_path / "b"), "lora_task_id": 7},
        {"input_ids": [1], "lora": "./a"},
        {"input_ids": [1]},
        {"input_ids": [1], "lora": "nowhere"},
        {"input_ids": [1], "lora": "loop"},
        {"input_ids": [1], "lora": 3},
        {"input_ids": [1], "lora": "a", "lora_config": [[1, 0, 1]]},
    ]
    path = tmp_path / "requests.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    first, other, again, base, *wrong = read_file(
        str(path), None, defaults={"request_output_len": 5}
    )

    assert tensors(other)["lora_task_id"] == 7
    assert tensors(other)["lora_config"] == [[1, 0, 2]]
    assert tensors(first)["lora_config"] == [[1, 0, 1]]
    assert tensors(first)["lora_task_id"] == 1 << 32  # above the ids that lines give
    assert tensors(again) == tensors(first)
    assert again.request.tensors["lora_weights"] is first.request.tensors["lora_weights"]
    assert not base.request.tensors.keys() & {"lora_task_id", "lora_weights"}
    told = "nowhere", "lora = 'loop'", "lora must be a folder, got 3", "pass either lora or"
    for line, text in zip(wrong, told, strict=True):
        assert text in str(line.error)


def test_adapters_in_lines_are_read_with_the_names_of_the_model(tmp_path):
    """`up_proj` is the gate's neighbor in Llama, and the whole first matrix where there is none."""
    model = tmp_path / "model"
    model.mkdir()
    config = {
        "model_type": "nemotron",
        "architectures": ["NemotronForCausalLM"],
        "norm_eps": 1e-5,
        **FAMILY_CONFIGS["nemotron"],
    }
    (model / "config.json").write_text(json.dumps(config))
    folder = tmp_path / "adapter"
    folder.mkdir()
    peft = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["up_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(peft))
    module = "base_model.model.model.layers.0.mlp.up_proj"
    sizes = {"A": (1, config["hidden_size"]), "B": (config["intermediate_size"], 1)}
    save_file(
        {f"{module}.lora_{name}.weight": torch.ones(size) for name, size in sizes.items()},
        folder / "adapter_model.safetensors",
    )
    line = json.dumps({"input_ids": [1], "lora": str(folder)}).encode()
    names = {"any": None, "nemotron": model}
    found = {
        name: next(read_requests([line], None, defaults={"request_output_len": 5}, model=own))
        for name, own in names.items()
    }
    modules = {name: tensors(it)["lora_config"][0][0] for name, it in found.items()}
    assert modules == {
        "any": LORA_MODULE_IDS["mlp_gate"],
        "nemotron": LORA_MODULE_IDS["mlp_h_to_4h"],
    }
