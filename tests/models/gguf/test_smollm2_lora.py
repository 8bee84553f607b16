"""An adapter of the real model, trained by PEFT, in one batch with the base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from smollm2 import smollm2_file

from gptmanager import GptManager, ModelType, OptionalParams
from gptmanager.callbacks import ChatTemplate, RequestQueue, load_peft_adapter, load_tokenizer
from gptmanager.models.conversion import convert_checkpoint

QUESTIONS = ("Who are you?", "What is the capital of France?")
SYSTEM = {"role": "system", "content": "Be brief."}  # shorter than the model's own
LEARNED = "Ahoy, matey!"
NUM_STEPS = 20
NUM_TOKENS = 6
LAYERS = [*range(24, 30)]  # the backward pass ends at the first of them


def prompts(file: Path) -> list[list[int]]:
    with ChatTemplate.of_folder(file) as template:
        return [template.render([SYSTEM, {"role": "user", "content": it}]) for it in QUESTIONS]


def train(model: Any, prompt: list[int], answer: list[int]) -> None:
    """Train on the answer only."""
    optimizer = torch.optim.AdamW(
        [parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-2
    )
    text, labels = torch.tensor([prompt + answer]), torch.tensor([[-100, *answer]])
    for _ in range(NUM_STEPS):
        model(input_ids=text, labels=labels, logits_to_keep=labels.shape[1]).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def greedy(model: Any, prompt: list[int]) -> list[int]:
    found = model.generate(
        input_ids=torch.tensor([prompt]), do_sample=False, max_new_tokens=NUM_TOKENS
    )
    tokens: list[int] = found[0, len(prompt) :].tolist()
    return tokens[:-1] if tokens[-1] == model.generation_config.eos_token_id else tokens


@pytest.mark.slow
def test_an_adapter_answers_next_to_its_base(tmp_path: Path) -> None:
    file = smollm2_file()
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")

    # Given an adapter that PEFT has trained, on the weights that we read
    folder = tmp_path / "smollm2"
    convert_checkpoint(file, folder, dtype="float32")
    base = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    base.generation_config.eos_token_id = 2
    asked = prompts(file)
    tokenizer = load_tokenizer(file)
    answer = [*tokenizer.encode(LEARNED).ids, 2]
    of_base = [greedy(base, prompt) for prompt in asked]
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=["q_proj", "v_proj", "down_proj"],
        layers_to_transform=LAYERS,
    )
    tuned = peft.get_peft_model(base, config)
    train(tuned, asked[0], answer)
    of_tuned = [greedy(tuned, prompt) for prompt in asked]
    assert tokenizer.decode(of_tuned[0]) == LEARNED and of_tuned[0] != of_base[0]
    tuned.save_pretrained(tmp_path / "adapter")

    # When both answer in one batch
    weights, lora_config = load_peft_adapter(tmp_path / "adapter", model=file)
    brought = {"lora_task_id": 1, "lora_weights": weights, "lora_config": lora_config}
    records: list[str] = []
    with RequestQueue.for_checkpoint(file) as queue:
        with GptManager(
            file,
            ModelType.INFLIGHT_FUSED_BATCHING,
            get_inference_requests_cb=queue.get_inference_requests,
            send_response_cb=queue.send_response,
            return_batch_manager_stats_cb=records.append,
            optional_params=OptionalParams(dtype="float32", max_seq_len=128),
        ) as manager:
            queue.attach(manager)
            queue.submit(asked[0], 1, **brought).result(60)  # the adapter is loaded then
            generations = [
                queue.submit(prompt, NUM_TOKENS, **lora)
                for prompt in asked
                for lora in ({}, {"lora_task_id": 1})
            ]
            found = [list(one.result(60).generated_ids[0]) for one in generations]

    # Then each has the answers of transformers and PEFT
    assert found[0::2] == of_base
    assert found[1::2] == of_tuned
    assert any(json.loads(record)["Scheduled Requests"] == 4 for record in records)
