import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from gptmanager import InferenceRequest
from gptmanager.callbacks import ChatTemplate, RequestQueue, TokenDefaults, load_tokenizer
from gptmanager.callbacks.text.checkpoint import checked_defaults, sampling_defaults
from gptmanager.errors import ConfigError


def request(**by_name):
    return InferenceRequest.from_tokens(0, [1], 5, **by_name)


def test_sampling_defaults_are_greedy_if_the_checkpoint_does_not_sample(tmp_path):
    assert sampling_defaults(tmp_path) == {}
    file = tmp_path / "generation_config.json"
    values = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "repetition_penalty": 1.1}
    for do_sample, found in (
        (True, {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}),
        (None, {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}),
        (False, {"temperature": 0.0, "repetition_penalty": 1.1}),
    ):
        file.write_text(json.dumps({**values, "do_sample": do_sample}))
        assert sampling_defaults(tmp_path) == found


def test_generation_config_comes_before_config(checkpoint, tmp_path):
    assert TokenDefaults.of_folder(checkpoint) == TokenDefaults((7, 8, 9), 3)

    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    assert TokenDefaults.of_folder(tmp_path) == TokenDefaults((5,), None)
    inner = {"eos_token_id": [6, 7], "pad_token_id": 2}
    for outer, found in (
        ({}, TokenDefaults((6, 7), 2)),
        ({"eos_token_id": 5, "pad_token_id": None}, TokenDefaults((5,), 2)),
    ):
        config = {"model_type": "gemma3", **outer, "text_config": inner}
        (tmp_path / "config.json").write_text(json.dumps(config))
        assert TokenDefaults.of_folder(tmp_path) == found


@pytest.mark.parametrize("outer", [{}, {"text_config": {"vocab_size": 7}}])
def test_end_ids_outside_of_the_vocabulary_are_left_out(tmp_path, outer):
    """Added tokens that the model cannot generate; transformers accepts them."""
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 7, **outer}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [6, 7, 2]}))
    assert TokenDefaults.of_folder(tmp_path) == TokenDefaults((6, 2), None)


def test_a_folder_without_token_ids_has_no_defaults(tmp_path):
    assert TokenDefaults.of_folder(tmp_path) == TokenDefaults()
    of = checked_defaults
    assert of(np.int64(7), None) == of([7], None) == TokenDefaults((7,))
    assert of(None, None) == TokenDefaults()
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": None}))
    assert TokenDefaults.of_folder(tmp_path) == TokenDefaults()


def test_a_folder_that_is_not_there_is_an_error(tmp_path):
    for source in (TokenDefaults.of_folder, RequestQueue.for_checkpoint):
        with pytest.raises(ConfigError, match=r"tiny_lama.* is not a folder"):
            source(tmp_path / "tiny_lama")


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_an_unreadable_config_is_named(tmp_path, text):
    (tmp_path / "generation_config.json").write_text(text)

    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        TokenDefaults.of_folder(tmp_path)


def test_fields_of_a_request_are_kept():
    filled = request(end_id=-1, pad_id=4)

    TokenDefaults((7, 8), 3).fill(filled)

    assert filled.end_id.tolist() == -1
    assert filled.pad_id.tolist() == 4
    assert "stop_words_list" not in filled.tensors


def test_nothing_is_set_without_defaults():
    filled = request()

    TokenDefaults().fill(filled)

    assert filled.tensors.keys() == {"input_ids", "request_output_len"}


@pytest.mark.parametrize("more", [{}, {"stop_words_list": [[5, 7]]}])
def test_all_end_tokens_become_end_ids(more):
    filled, as_before = request(**more), request(**more)

    TokenDefaults((7, 8, 9), 3).fill(filled)

    assert filled.end_id.tolist() == [7, 8, 9]
    assert filled.pad_id.tolist() == [3]
    assert repr(filled.tensors.get("stop_words_list")) == repr(
        as_before.tensors.get("stop_words_list")
    )


def test_a_tokenizer_is_loaded(checkpoint):
    tokenizer = load_tokenizer(checkpoint)

    assert tokenizer.decode(tokenizer.encode("once upon").ids) == "once upon"


def test_a_missing_tokenizer_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*pass token ids"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.model", "tekken.json", "vocab.json"])
def test_a_tokenizer_in_another_format_is_named(name, tmp_path):
    (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"it has {name}, from which transformers makes one"):
        load_tokenizer(tmp_path)


ADDED = {"content": "<|new|>", "special": True, "normalized": False}
WIDE = {"content": " <x>", "special": False, "lstrip": True, "rstrip": True}

PLAIN = {"content": "<x>", "special": False, "normalized": False}
NOT_SPECIAL = {"content": "<|endoftext|>", "special": False, "normalized": False}


def tokenizer_folder(folder, **files):
    shutil.copy("examples/tiny_llama/tokenizer.json", folder)
    config = json.loads(Path("examples/tiny_llama/tokenizer_config.json").read_text())
    for name, content in {
        "tokenizer_config": {},
        "config": {"model_type": "llama"},
        **files,
    }.items():
        content = {**config, **content} if name == "tokenizer_config" else content
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"added_tokens_decoder": {"641": WIDE, "640": ADDED}}},
        {"tokenizer_config": {"added_tokens_decoder": {"640": {**ADDED, "special": False}}}},
        {"added_tokens": {" <x>": 641, "<|new|>": 640}},
        {"tokenizer_config": {"eos_token": "<|new|>"}, "added_tokens": {"<|new|>": 640}},
        {"tokenizer_config": {"eos_token": "<x>", "added_tokens_decoder": {"640": PLAIN}}},
        {"tokenizer_config": {"added_tokens_decoder": {"0": NOT_SPECIAL, "640": ADDED}}},
        {"added_tokens": {"<|endoftext|>": 0, "<|new|>": 640}},
        {"tokenizer_config": {"eos_token": " <x>", "image_token": "<|b|>", "bos_token": "<|new|>"}},
        {"tokenizer_config": {"extra_special_tokens": {"image_token": "<|new|>"}}},
        {"tokenizer_config": {"additional_special_tokens": ["<|new|>", " <x>", "once"]}},
        {"special_tokens_map": {"pad_token": " <x>", "eos_token": {**ADDED, "lstrip": True}}},
        {
            "tokenizer_config": {"added_tokens_decoder": {"9": ADDED}, "pad_token": " <x>"},
            "special_tokens_map": {"eos_token": "<|b|>"},
        },
        {
            "tokenizer_config": {
                "added_tokens_decoder": {
                    "0": {**ADDED, "content": "<|endoftext|>", "rstrip": True}
                },
                "unk_token": "<|new|>",
            }
        },
    ],
)
def test_added_tokens_outside_of_tokenizer_json_are_those_of_transformers(files, tmp_path):
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    folder = tokenizer_folder(tmp_path, **files)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(folder), load_tokenizer(folder)
    text = "once <|new|> upon  <x> a<|endoftext|> <|b|>"
    ids = theirs(text)["input_ids"]
    assert 640 in ids and ours.encode(text).ids == ids
    for skip in (True, False):
        plain = ours.decode(ids, skip_special_tokens=skip)
        assert plain == theirs.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"pad_token": "<x>"},
        {"pad_token": "<x>", "added_tokens_decoder": {"640": PLAIN}},
        {"additional_special_tokens": ["<x>"]},
        {"additional_special_tokens": ["<x>"], "added_tokens_decoder": {"640": PLAIN}},
    ],
)
def test_which_added_tokens_of_tokenizer_json_become_special(more, tmp_path):
    """Those with a name, as in transformers."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers")
    path = str(tokenizer_folder(tmp_path, tokenizer_config=more) / "tokenizer.json")
    tokenizer = Tokenizer.from_file(path)
    tokenizer.add_tokens([AddedToken("<x>", special=False, normalized=False)])
    tokenizer.save(path)
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path), load_tokenizer(tmp_path)
    ids = theirs("once<x>")["input_ids"]
    assert ids[-1] == 640 and ours.encode("once<x>").ids == ids
    expected = "once" if "pad_token" in more else "once<x>"
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True) == expected


@pytest.mark.parametrize(
    "decoder",
    [[], {"x": ADDED}, {"640": 5}, {"640": {}}, {"640": {**ADDED, "lstrip": 1}}, {"640": None}],
)
def test_added_tokens_that_cannot_be_read_are_named(decoder, tmp_path):
    folder = tokenizer_folder(tmp_path, tokenizer_config={"added_tokens_decoder": decoder})
    with pytest.raises(ConfigError, match="tokenizer_config.json: added_tokens_decoder: "):
        load_tokenizer(folder)


@pytest.mark.parametrize("number", ["[]", "{}", "null", "1e999", '"x"'])
def test_ids_of_added_tokens_that_cannot_be_read_are_refused(number, tmp_path):
    folder = tokenizer_folder(tmp_path)
    (folder / "added_tokens.json").write_text(f'{{"<|new|>": {number}}}')
    with pytest.raises(ConfigError, match="added_tokens.json: "):
        load_tokenizer(folder)


def test_special_tokens_that_cannot_be_read_are_refused(tmp_path):
    folder = tokenizer_folder(tmp_path, tokenizer_config={"eos_token": {**ADDED, "lstrip": 1}})
    with pytest.raises(ConfigError, match="special tokens: 'int' object (is not|cannot be)"):
        load_tokenizer(folder)


def test_special_tokens_of_a_template_may_be_in_another_file(tmp_path):
    template = "{{ messages[0].content }}{{ eos_token }}"
    folder = tokenizer_folder(
        tmp_path,
        tokenizer_config={"chat_template": template},
        special_tokens_map={"eos_token": "<|new|>"},
    )
    with ChatTemplate.of_folder(folder) as chat:
        assert chat.render([{"role": "user", "content": "once"}])[-1] == 640


def test_a_broken_tokenizer_is_a_config_error(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")

    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_tokenizer_whose_path_is_not_utf_8(tmp_path):
    folder = os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")
    os.mkdir(folder)
    shutil.copy("examples/tiny_llama/tokenizer.json", folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.to_str() == load_tokenizer("examples/tiny_llama").to_str()
