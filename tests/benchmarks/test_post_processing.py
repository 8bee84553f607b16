"""The time that logits post-processors take on the loop's thread, per step, by number of rows.

The vocabulary has 32,000 random tokens. Goal for guided rows: at most 50 us for each token of a
request, as the median on a quiet core. `make test` runs each once; `make bench` times them.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gptmanager import GuidedDecoding
from gptmanager.callbacks import BannedTokens
from gptmanager.decoding.lines import Lines
from gptmanager.decoding.processors.logits import PostProcessing
from gptmanager.request.post_processor import RequestProcessor
from gptmanager.request.sampling_params import SamplingParams
from gptmanager.step import SequenceStart

VOCAB_SIZE = 32_000
STEPS = 60
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 400},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "bb", "ccc"]}, "maxItems": 5},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}


def large_tokenizer():
    """Return a tokenizer with a token for each byte, and many tokens of random letters."""
    chance = np.random.default_rng(1)
    vocabulary = dict.fromkeys(sorted(pre_tokenizers.ByteLevel.alphabet()))
    letters = np.array(list("etaoinshrdlucmfwypvbgkjqxzETAOINS0123456789"))
    while len(vocabulary) < VOCAB_SIZE - 1:
        vocabulary["".join(chance.choice(letters, chance.integers(2, 9)))] = None
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(vocabulary)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


class Steps:
    """Steps of `num_rows` sequences, each with a token that its processor permits."""

    def __init__(self, processor, num_rows):
        self.processing = PostProcessing(Lines(num_rows))
        self.num_rows = num_rows
        for slot in range(num_rows):
            handle = RequestProcessor(processor)
            params = SamplingParams(end_ids=(VOCAB_SIZE - 1,))
            self.processing.start(SequenceStart(slot, (), 1, params, handle))
        self.tokens = np.zeros((num_rows, STEPS * 2), dtype=np.int32)
        self.length = 1
        self.slots = np.arange(num_rows)
        self.ids = list(range(num_rows))
        self.fresh = torch.rand(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
        self.logits = self.fresh.clone()

    def prepare(self):
        self.tokens[:, self.length] = self.logits.argmax(1).numpy()
        self.length += 1
        # another token is the best one each time
        self.logits.copy_(self.fresh.roll(self.length * 1237, dims=1))

    def run(self):
        lengths = np.full(self.num_rows, self.length)
        assert not self.processing.run(self.logits, self.ids, self.slots, lengths, self.tokens)


def time_steps(benchmark, processor, num_rows):
    steps = Steps(processor, num_rows)
    steps.run()
    benchmark.extra_info["rows"] = num_rows
    benchmark.pedantic(steps.run, setup=steps.prepare, rounds=STEPS)


@pytest.mark.parametrize("num_rows", [1, 8, 64])
@pytest.mark.every(3)
def test_guided_rows(benchmark, num_rows):
    grammar = GuidedDecoding(large_tokenizer(), [VOCAB_SIZE - 1]).json_schema(SCHEMA)
    grammar.compiled.result()
    time_steps(benchmark, grammar, num_rows)


@pytest.mark.parametrize("num_rows", [64])
def test_rows_of_a_function_that_does_nothing(benchmark, num_rows):
    time_steps(benchmark, lambda *arguments: None, num_rows)


@pytest.mark.parametrize("num_rows", [64])
def test_rows_of_banned_tokens(benchmark, num_rows):
    time_steps(benchmark, BannedTokens().bind([1, 2, 3]), num_rows)
