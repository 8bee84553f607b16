"""Train the Llama checkpoint in examples/tiny_llama on the texts of tiny_corpus.

It trains a byte-level BPE tokenizer, then the model, and writes both as a Hugging Face folder. Then
it measures every task on prompts that were held out of the training. Needs torch, transformers and
rich; no download, no GPU.

    python examples/train_tiny_llama.py --output examples/tiny_llama
"""

import argparse
from collections import defaultdict
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from random import Random

import torch
from rich.progress import Progress, track
from tiny_corpus import TASKS, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers import get_cosine_schedule_with_warmup as cosine_schedule

CONTEXT = 512  # tokens in a row of training text, and the most that the model is made for
IGNORED = -100  # the label of a token that the loss leaves out
# The model knows no roles: its prompt is what all messages say, a line each.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
    {{- message.content -}}
    {%- if not loop.last %}{{- "\\n" -}}{% endif -%}
{%- endfor -%}
"""
LEARNED_PROMPTS = 0.1  # share of prompts that are learned, too: prompts are random, mostly noise


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of the checkpoint")
    for name, default, meaning in (
        ("--steps", 3500, "optimizer steps"),
        ("--batch-size", 4, f"rows of {CONTEXT} tokens in a step"),
        ("--learning-rate", 5e-3, "learning rate at its peak"),
        ("--held-out", 1000, "held-out prompts to measure"),
        ("--seed", 0, "seed of text and weights"),
        ("--threads", 2, "CPU threads"),
    ):
        parser.add_argument(
            name, type=type(default), default=default, help=f"{meaning} (default: %(default)s)"
        )
    return parser.parse_args()


def train_tokenizer(random: Random) -> PreTrainedTokenizerFast:
    """A byte-level BPE with a token for every word of the corpus, and one for each digit."""
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    end, pad = "<|endoftext|>", "<|pad|>"
    trainer = trainers.BpeTrainer(
        vocab_size=640,
        special_tokens=[end, pad],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    sample = (document.prompt + document.completions[0] for document in documents(random))
    tokenizer.train_from_iterator(islice(sample, 20_000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        chat_template=CHAT_TEMPLATE,
        padding_side="left",
        model_max_length=CONTEXT,
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,  # a prompt begins with its own first word
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def encoded_documents(tokenizer: PreTrainedTokenizerFast, random: Random) -> Iterator[Tensor]:
    """Documents to learn from, each as three rows: token ids, labels for the loss, positions."""
    stream = documents(random)
    while chunk := list(islice(stream, 256)):  # many at once, for speed
        prompts = [document.prompt for document in chunk]
        completions = [
            random.choice(document.completions) + tokenizer.eos_token for document in chunk
        ]
        encoded = (tokenizer(texts)["input_ids"] for texts in (prompts, completions))
        for prompt, completion in zip(*encoded, strict=True):
            tokens = prompt + completion
            learned = random.random() < LEARNED_PROMPTS
            labels = tokens if learned else [IGNORED] * len(prompt) + completion
            yield torch.tensor([tokens, labels, list(range(len(tokens)))])


def batches(
    tokenizer: PreTrainedTokenizerFast, random: Random, size: int
) -> Iterator[dict[str, Tensor]]:
    """Rows full of documents. Positions start again with each, so no document sees another."""
    stream = encoded_documents(tokenizer, random)
    while True:
        batch = torch.empty(3, size, CONTEXT, dtype=torch.long)
        for row in batch.unbind(1):
            filled = 0
            while filled < CONTEXT:
                document = next(stream)[:, : CONTEXT - filled]
                row[:, filled : filled + document.shape[1]] = document
                filled += document.shape[1]
        yield dict(zip(("input_ids", "labels", "position_ids"), batch, strict=True))


def optimizers(model: LlamaForCausalLM, learning_rate: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers: they need far less text with it. AdamW for the rest."""
    layers = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    rest = [weight for weight in model.parameters() if all(weight is not other for other in layers)]
    return [
        torch.optim.Muon(
            layers, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(rest, lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def train(
    model: LlamaForCausalLM, data: Iterator[dict[str, Tensor]], steps: int, learning_rate: float
) -> None:
    pairs = [(o, cosine_schedule(o, steps // 30, steps)) for o in optimizers(model, learning_rate)]
    with Progress(*Progress.get_default_columns(), "{task.fields[loss]}") as progress:
        task = progress.add_task("training", total=steps, loss="")
        for batch in islice(data, steps):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(**batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer, schedule in pairs:
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
            progress.update(task, advance=1, loss=f"loss {loss.item():.3f}")


@torch.inference_mode()
def measure(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, random: Random, size: int
) -> str:
    """Complete held-out prompts greedily. Returns a table: how many completions are right."""
    outcomes = defaultdict(list)
    sample = sorted(
        islice(documents(random, held_out=True), size),
        key=lambda document: len(document.completions[0]),
    )
    for start in track(range(0, size, 50), "measuring"):
        group = sample[start : start + 50]
        prompts = [document.prompt for document in group]
        inputs = tokenizer(prompts, padding=True, return_tensors="pt")
        outputs = model.generate(**inputs, max_new_tokens=256, do_sample=False)
        completions = outputs[:, inputs["input_ids"].shape[1] :]
        answers = tokenizer.batch_decode(completions, skip_special_tokens=True)
        for document, answer in zip(group, answers, strict=True):
            outcomes[document.task].append(answer in document.completions)
    rows = (
        f"| {task.__name__} | {len(right)} | {sum(right) / len(right):.1%} |"
        for task in TASKS
        if (right := outcomes[task.__name__])
    )
    return "\n".join(["| task | held-out prompts | right |", "|---|---|---|", *rows])


def main() -> None:
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    random = Random(arguments.seed)
    tokenizer = train_tokenizer(random)
    model = build_model(tokenizer)
    data = batches(tokenizer, random, arguments.batch_size)
    train(model, data, arguments.steps, arguments.learning_rate)
    for part in (model, tokenizer):
        part.save_pretrained(arguments.output)
    print(measure(model.eval(), tokenizer, random, arguments.held_out))


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("interrupted") from None
