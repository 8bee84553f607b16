import json

import pytest
import torch
from left_threads import no_thread_is_left
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

CORPUS = [
    "once upon a time there was a café",
    "zwölf Boxkämpfer",
    "12 + 30 = 42",
    "naïve 日本語 🙂🙃",
]


@pytest.fixture(autouse=True, name="no_thread_is_left")
def ended_threads():
    with no_thread_is_left():
        yield


@pytest.fixture(scope="session")
def tokenizer():
    """Byte-level BPE with an end token: id 0."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=alphabet,
        special_tokens=["<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


@pytest.fixture(scope="session")
def checkpoint(tokenizer, tmp_path_factory):
    """A folder with what surrounds the weights of a checkpoint."""
    folder = tmp_path_factory.mktemp("checkpoint")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [7, 8, 9], "pad_token_id": 3})
    )
    (folder / "config.json").write_text(json.dumps({"eos_token_id": 5}))
    return folder


@pytest.fixture(autouse=True, scope="session")
def one_torch_thread():
    torch.set_num_threads(1)
