"""A real model, SmolLM2-135M-Instruct in Q4_1: its answers, token ids and perplexity."""

from __future__ import annotations

import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import PagedDriver
from gguf_tokenizers import TEXTS, expected_ids
from smollm2 import smollm2_file

from gptmanager import OptionalParams, cli
from gptmanager.callbacks import ChatTemplate, TokenDefaults, generate, load_tokenizer
from gptmanager.models import load_model

ROOT = Path(__file__).resolve().parents[3]
ANSWERS = json.loads(Path(__file__).with_name("smollm2_answers.json").read_text("utf-8"))["answers"]
NUM_TOKENS = 300  # the length of the text with the perplexity


@pytest.fixture(scope="module")
def file() -> Path:
    return smollm2_file()


def test_the_ids_are_those_of_llama_cpp(file: Path) -> None:
    tokenizer = load_tokenizer(file)
    assert [tokenizer.encode(text).ids for text in TEXTS] == expected_ids("smollm2")
    assert all(
        tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
        for text in TEXTS
    )
    assert TokenDefaults.of_folder(file) == TokenDefaults(end_ids=(2, 0), pad_id=2)


def test_prompts_of_chats_are_those_of_llama_cpp(file: Path) -> None:
    with ChatTemplate.of_folder(file) as template:
        for answer in ANSWERS:
            messages = [{"role": "user", "content": answer["question"]}]
            assert template.render(messages) == answer["prompt_ids"]


def test_answers_are_those_of_transformers(file: Path) -> None:
    found = generate(
        file,
        [answer["prompt_ids"] for answer in ANSWERS],
        24,
        optional_params=OptionalParams(dtype="float32", max_seq_len=128),
    )
    for answer, ids in zip(ANSWERS, found, strict=True):
        expected = answer["answer_ids"]
        assert ids == (expected[:-1] if expected[-1] == 2 else expected), answer["question"]


def test_the_readme_shows_its_answer(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    command, answer = readme.split("$ gptmanager ")[1].split("```")[0].split("\n")[:2]

    assert cli.main(shlex.split(command)) == 0
    assert capsys.readouterr().out == answer + "\n"


def perplexity(file: Path, **options: Any) -> float:
    text = (ROOT / "LICENSE").read_text("utf-8")
    tokens = load_tokenizer(file).encode(text).ids[:NUM_TOKENS]
    model = load_model(file, max_seq_len=NUM_TOKENS, **options)
    pages = torch.float32 if model.spec.dtype is torch.float32 else torch.bfloat16
    logits = PagedDriver(model, 1, 64, pages).forward([(0, tokens)]).float()
    losses = torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]))
    return math.exp(losses.item())


@pytest.mark.slow
def test_dtypes_have_the_same_perplexity(file: Path) -> None:
    exact = perplexity(file)
    assert 2 < exact < 20
    assert perplexity(file, dtype="bfloat16") == pytest.approx(exact, rel=0.005)
    assert perplexity(file, weights_dtype="int8") == pytest.approx(exact, rel=0.02)
    assert perplexity(file, weights_dtype="file") == pytest.approx(exact, rel=0.02)
