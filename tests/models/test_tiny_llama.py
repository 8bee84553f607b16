"""The bundled checkpoint examples/tiny_llama: its files, and that it learned what it was taught."""

import json
from pathlib import Path

import pytest
import torch
from checkpoints import PagedDriver
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from gptmanager.models import load_model

EXAMPLES = Path(__file__).parents[2] / "examples"
CHECKPOINT = EXAMPLES / "tiny_llama"
FACTS = "Tom lives near the lake. He has a red ball. He likes apples."


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return AutoModelForCausalLM.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json"))


@torch.inference_mode()
def complete(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, max_new_tokens: int = 80
) -> str:
    """The greedy completion; it must have ended of its own accord."""
    prompt_ids = tokenizer.encode(prompt).ids
    output = model.generate(
        torch.tensor([prompt_ids]), max_new_tokens=max_new_tokens, do_sample=False
    )
    *completion, last = output[0, len(prompt_ids) :].tolist()
    assert last == model.config.eos_token_id
    return tokenizer.decode(completion)


def test_checkpoint_is_a_small_llama() -> None:
    config = json.loads((CHECKPOINT / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert (CHECKPOINT / "model.safetensors").stat().st_size <= 8e6


def test_tokenizer_gives_back_any_text_and_adds_nothing(tokenizer: Tokenizer) -> None:
    text = "Tom has 17 naïve\n apples… 日本"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("1729").tokens == list("1729")


def test_chat_template_gives_back_what_messages_say() -> None:
    roles = ("system", "user", "assistant", "user")
    messages = [{"role": role, "content": f" {role}\n"} for role in roles]
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    for add_generation_prompt in (False, True):
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=add_generation_prompt
        )
        assert text == "\n".join(f" {role}\n" for role in roles)


@pytest.mark.parametrize(
    ("prompt", "completion"),
    [
        ("17 + 25 =", " 42"),
        ("58 + 67 =", " 125"),
        ("90 - 33 =", " 57"),
        ("Tom has 12 apples. Mia gives Tom 30 more. Now Tom has", " 42 apples."),
        ("Count from 8 to 13:", " 8, 9, 10, 11, 12, 13."),
        ("Say 3 times: red kite =", " red kite, red kite, red kite."),
        (f"{FACTS}\nQuestion: What colour is Tom's ball?\nAnswer:", " red"),
        (f"{FACTS}\nQuestion: Where does he live?\nAnswer:", " near the lake"),
    ],
)
def test_completion_is_right(
    model: LlamaForCausalLM, tokenizer: Tokenizer, prompt: str, completion: str
) -> None:
    assert complete(model, tokenizer, prompt) == completion


def test_story_keeps_to_its_persons_and_things(
    model: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    story = complete(model, tokenizer, "Tom had a red ball. Mia had a green kite.")
    assert "Tom" in story and "Mia" in story and ("red ball" in story or "green kite" in story)
    assert story.endswith(" The end.")


def test_requests_are_ready_to_send(tokenizer: Tokenizer) -> None:
    requests = [json.loads(line) for line in (EXAMPLES / "requests.jsonl").read_text().splitlines()]
    assert len({request["request_id"] for request in requests}) == len(requests)
    for request in requests:
        assert len(tokenizer.encode(request["prompt"]).ids) + request["max_new_tokens"] <= 512


def test_perplexity_in_8_bits_is_within_a_hundredth(tokenizer: Tokenizer) -> None:
    texts = [
        FACTS,
        "17 + 25 = 42",
        "Tom has 12 apples. Mia gives Tom 30 more. Now Tom has 42 apples.",
        "Count from 8 to 13: 8, 9, 10, 11, 12, 13.",
    ]
    perplexities = []
    for weights_dtype in (None, "int8"):
        network = load_model(CHECKPOINT, weights_dtype=weights_dtype)
        losses = []
        for text in texts:
            ids = tokenizer.encode(text).ids
            logits = PagedDriver(network, 1).forward([(0, ids)])
            targets = torch.tensor(ids[1:])
            losses.append(cross_entropy(logits[:-1].float(), targets, reduction="none"))
        perplexities.append(torch.cat(losses).mean().exp().item())
    assert perplexities[1] == pytest.approx(perplexities[0], rel=0.01)
    assert perplexities[1] != perplexities[0]
