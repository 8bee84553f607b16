"""Train the Llama-architecture checkpoint in examples/tiny_llama, from nothing, on text made up by tiny_corpus.

It trains a byte-level BPE tokenizer, then the model, writes both as a Hugging Face folder, and measures each task on
prompts that were held out of the training. Needs torch, transformers and tqdm; no download, no GPU.

    python examples/train_tiny_llama.py --output examples/tiny_llama
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from random import Random

import torch
from tiny_corpus import TASKS, Document, documents
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from tqdm import tqdm
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

END, PAD = "<|endoftext|>", "<|pad|>"
MAX_NEW_TOKENS = 250  # of the measurement: the longest right completions have some 200


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=16, help="rows in a batch (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens in a row (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="highest (default: %(default)s)")
    parser.add_argument("--held-out", type=int, default=2000, help="prompts to measure (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of text and weights (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--opt", default="adamw")
    parser.add_argument("--mask", type=float, default=0)
    parser.add_argument("--h", type=int, default=192)
    parser.add_argument("--i", type=int, default=512)
    parser.add_argument("--l", type=int, default=4)
    return parser.parse_args()


def train_tokenizer(seed: int, vocab_size: int = 768) -> PreTrainedTokenizerFast:
    """A byte-level BPE that keeps every digit a token of its own."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    sample = islice(documents(Random(seed)), 20_000)
    tokenizer.train_from_iterator((d.prompt + d.completions[0] for d in sample), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=PAD, padding_side="left"
    )


def build_model(tokenizer, a) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=a.h,
        intermediate_size=a.i,
        num_hidden_layers=a.l,
        num_attention_heads=a.h//32,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return LlamaForCausalLM(config)


def batches(tokenizer, random: Random, size: int, length: int, mask) -> Iterator[Tensor]:
    stream = documents(random)
    while True:
        rows = []
        while len(rows) < size:
            row, lab = [], []
            docs = list(islice(stream, 64)); 
            ps = tokenizer._tokenizer.encode_batch([d.prompt for d in docs]); cs = tokenizer._tokenizer.encode_batch([random.choice(d.completions) + END for d in docs])
            for p, c in zip(ps, cs):
                if not row and len(p.ids)+len(c.ids) > length: pass
                row += p.ids + c.ids
                lab += ([-100] * len(p.ids) if random.random() < mask else p.ids) + c.ids
                if len(row) >= length:
                    rows.append((row[:length], lab[:length])); row, lab = [], []
        yield torch.tensor(rows[:size])


def train(model, tokenizer, arguments) -> None:
    opts = []
    if arguments.opt == "muon":
        mat = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        rest = [p for n, p in model.named_parameters() if not (p.ndim == 2 and "embed" not in n)]
        opts = [torch.optim.Muon(mat, lr=arguments.learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), torch.optim.AdamW(rest, lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.0, fused=True)]
    else:
        opts = [torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.98), weight_decay=0.1, fused=True)]
    schedules = [get_cosine_schedule_with_warmup(o, arguments.steps // 30, arguments.steps) for o in opts]
    data = batches(tokenizer, Random(arguments.seed), arguments.batch_size, arguments.length, arguments.mask)
    progress = tqdm(islice(data, arguments.steps), total=arguments.steps, unit="step", mininterval=10)
    for k, batch in enumerate(progress):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=batch[:, 0], labels=batch[:, 1]).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o, s in zip(opts, schedules):
            o.step(); s.step(); o.zero_grad()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)


@torch.inference_mode()
def measure(model, tokenizer, count: int, seed: int, batch_size: int = 100) -> dict[str, list[bool]]:
    """Complete held-out prompts greedily; say for each task which completions were right."""
    right = defaultdict(list); wrong = defaultdict(list)
    sample = sorted(islice(documents(Random(seed), held_out=True), count), key=lambda d: max(map(len, d.completions)))
    for start in tqdm(range(0, count, batch_size), desc="measuring", unit="batch", mininterval=10):
        group = sample[start : start + batch_size]
        inputs = tokenizer([d.prompt for d in group], padding=True, return_tensors="pt", return_token_type_ids=False)
        outputs = model.generate(**inputs, max_new_tokens=MAX_NEW_TOKENS, do_sample=False)
        answers = tokenizer.batch_decode(outputs[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for document, answer in zip(group, answers, strict=True):
            right[document.task].append(answer in document.completions)
            if answer not in document.completions: wrong[document.task].append((document.prompt, answer))
    for t, w in wrong.items():
        for x in w[:3]: print(t, x)
    return right


def main() -> None:
    arguments = parse_arguments()
    print(vars(arguments))
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    tokenizer = train_tokenizer(arguments.seed)
    model = build_model(tokenizer, arguments)
    print(sum(p.numel() for p in model.parameters()), len(tokenizer))
    t = time.time()
    train(model, tokenizer, arguments)
    print("time", time.time() - t)
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    right = measure(model.eval(), tokenizer, arguments.held_out, arguments.seed)
    for task in TASKS:
        outcomes = right[task.__name__]
        print(f"| {task.__name__} | {len(outcomes)} | {100 * sum(outcomes) / max(1, len(outcomes)):.1f} % |")


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        main()
