"""Small vocabularies for GGUF files, and the token ids that llama.cpp returns for `TEXTS`.

They are kept in tests/models/gguf/tokenizers. The files there are made anew by

    python tests/support/gguf_tokenizers.py LLAMA_TOKENIZE [MODEL.gguf]

with the path of llama.cpp's program `llama-tokenize`, and of SmolLM2's file for its ids. For each
text it runs `llama-tokenize -m FILE -f TEXT --ids --no-escape --log-disable`.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import CONFIGS
from gguf_files import F32, model_metadata, write_gguf
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

FOLDER = Path(__file__).resolve().parents[1] / "models" / "gguf" / "tokenizers"
TEXTS = [
    "Hello world",
    " Hello  world ",
    "In 2024, 1234567 people paid 99.50 EUR.",
    "x1=22;y=333",
    "tab\there\n\n  two  spaces",
    "don't we'll I'M YOU'RE they'd it's",
    "def f(x: int) -> int:\n    return x ** 2  # squared\n",
    "for (int i = 0; i < n; ++i) { a[i] += b[i]; }\r\n",
    '<div class="a">text &amp; more</div>',
    "SELECT * FROM t WHERE id = 0x1F AND name LIKE '%x%';",
    "3.14159 1e-9 1,000,000 007 12 345 6",
    "漢字かな交じり文です。",
    "你好，世界！今天是2024年5月17日。",
    "안녕하세요 세계",
    "مرحبا بالعالم، كيف حالك؟",
    "שלום עולם",
    "Привет, мир! Ёжик",
    "ünïcödé naïve café Ångström",
    "e\u0301 combining a\u0308",
    "🙂 emoji 👩\u200d👩\u200d👧\u200d👦 family 🏳️\u200d🌈 flag 🇩🇪",
    "नमस्ते दुनिया",
    "สวัสดีชาวโลก",
    "\u00a0no-break\u2003em space\u200bzero width",
    "a" * 40 + " " * 12 + "-" * 20 + "=" * 17,
    "CamelCaseWords snake_case_words SCREAMING_CASE kebab-case",
    "https://example.org/path?q=1&r=two#frag user@example.com",
    "...!!! ??? --- *** (([[{{}}]]))",
    "$100 €5 £7 100% #1 @home ~/x \\n `code` |pipe|",
    "\n\n\n   \n\t\t\n end",
    "<|im_start|>user\nHi<|im_end|>\n</s><s>[INST]<|eot_id|><|endoftext|>",
    "ﬁ ligature ½ ² ① Ⅷ ٣ ३ 五",
]
# name -> keys of its file besides the vocabulary
KINDS: Mapping[str, Mapping[str, Any]] = {
    "llama-bpe": {"tokenizer.ggml.pre": "llama-bpe"},
    "qwen2": {"tokenizer.ggml.pre": "qwen2", "tokenizer.ggml.add_bos_token": False},
    "deepseek-v3": {"tokenizer.ggml.pre": "deepseek-v3", "tokenizer.ggml.add_bos_token": True},
    "gpt-4o": {"tokenizer.ggml.pre": "gpt-4o"},
    "deepseek-llm": {"tokenizer.ggml.pre": "deepseek-llm"},
    "jais-2": {"tokenizer.ggml.pre": "jais-2"},
    "default": {"tokenizer.ggml.pre": "default"},
    "sentencepiece": {"tokenizer.ggml.model": "llama"},
    "gemma4": {"tokenizer.ggml.model": "gemma4"},
}
_BYTE_LEVEL, _SENTENCE_PIECE = "byte_level_vocabulary", "sentencepiece_vocabulary"


def vocabulary_of(name: str) -> str:
    return _SENTENCE_PIECE if name in ("sentencepiece", "gemma4") else _BYTE_LEVEL


def metadata_of(name: str) -> dict[str, Any]:
    """The keys of a file with this tokenizer."""
    kept = json.loads((FOLDER / f"{vocabulary_of(name)}.json").read_text("utf-8"))
    kept["tokenizer.ggml.token_type"] = np.array(kept["tokenizer.ggml.token_type"], np.int32)
    if "tokenizer.ggml.scores" in kept:
        kept["tokenizer.ggml.scores"] = np.array(kept["tokenizer.ggml.scores"], np.float32)
    if name == "gemma4":
        texts = {text: None for text in kept["tokenizer.ggml.tokens"]}
        pairs = [(text[:cut], text[cut:]) for text in texts for cut in range(1, len(text))]
        merges = [" ".join(pair) for pair in pairs if all(part in texts for part in pair)]
        kept["tokenizer.ggml.merges"] = merges
    return {**kept, **KINDS[name]}


def expected_ids(name: str) -> list[list[int]]:
    kept: dict[str, list[list[int]]] = json.loads((FOLDER / "ids.json").read_text("utf-8"))
    return kept[name]


def write_vocabulary(path: Path, metadata: Mapping[str, Any]) -> Path:
    """A file that has a tokenizer, and of its model no more than it must have."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    size = len(tokens) if isinstance(tokens, list) else 8
    config = {**CONFIGS["llama"], "rms_norm_eps": 1e-6}
    table = np.zeros((size, config["hidden_size"]), np.float32)
    keys = {**model_metadata("llama", config), **metadata}
    return write_gguf(path, keys, {"token_embd.weight": (F32, table)})


def _byte_level_vocabulary() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    texts = sorted(model["vocab"], key=model["vocab"].__getitem__)
    special = ["<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>"]
    count = len(texts)
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": [*texts, *special, "<tag>"],
        "tokenizer.ggml.token_type": [1] * count + [3] * len(special) + [4],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": count,
        "tokenizer.ggml.eos_token_id": count + 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def _sentencepiece_vocabulary() -> dict[str, Any]:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(" *[^ ]+| +"), "isolated")
    trainer = trainers.BpeTrainer(vocab_size=800, show_progress=False)
    tokenizer.train_from_iterator(_corpus(), trainer)
    model = json.loads(tokenizer.to_str())["model"]
    made = ["".join(pair) for pair in model["merges"]]
    single = [text for text in model["vocab"] if len(text) == 1]
    pieces = [text.replace(" ", "\u2581") for text in dict.fromkeys([*made, *sorted(single)])]
    pieces = [text for text in pieces if "\n" not in text and "\t" not in text]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *pieces, "[INST]"],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))] + [0.0],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


def _corpus() -> list[str]:
    root = Path(__file__).resolve().parents[2]
    return [(root / name).read_text("utf-8") for name in ("README.md", "docs/sampling.md")]


def _ids(program: str, file: Path, folder: Path) -> list[list[int]]:
    found, given = [], folder / "text"
    for text in TEXTS:
        given.write_bytes(text.encode())
        command = [program, "-m", str(file), "-f", str(given)]
        command += ["--ids", "--no-escape", "--log-disable"]
        ran = subprocess.run(command, capture_output=True, check=True, text=True)
        found.append(json.loads(ran.stdout))
    return found


def main(program: str, model: str | None = None) -> None:
    """Make the vocabularies and the ids anew."""
    made = {_BYTE_LEVEL: _byte_level_vocabulary(), _SENTENCE_PIECE: _sentencepiece_vocabulary()}
    for name, metadata in made.items():
        content = json.dumps(metadata, ensure_ascii=False)
        (FOLDER / f"{name}.json").write_text(content + "\n", "utf-8")
    ids = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in KINDS:
            file = write_vocabulary(Path(folder) / f"{name}.gguf", metadata_of(name))
            ids[name] = _ids(program, file, Path(folder))
        if model is not None:
            ids["smollm2"] = _ids(program, Path(model), Path(folder))
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(rows)}" for name, rows in ids.items())
    (FOLDER / "ids.json").write_text("{" + lines + "}\n", "utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
