"""A checkpoint folder with a template and tags, and a model that says given texts in turn."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copy

from gptmanager.callbacks import load_tokenizer
from gptmanager.testing import ScriptedModel

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"
_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "generation_config.json")
_LENGTH, _VOCABULARY = 4096, 700


class ScriptedTexts:
    """Writes the checkpoint into `folder`, and answers each request with the next text.

    `tags`, `special`: tokens of their own in the vocabulary; special ones are left out of texts.
    """

    def __init__(
        self, folder: Path, template: Path, *, tags: Sequence[str] = (), special: Sequence[str] = ()
    ) -> None:
        for name in _FILES:
            copy(MODEL / name, folder)
        copy(template, folder / "chat_template.jinja")
        self.tokenizer = load_tokenizer(folder)
        self.tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", *special])
        self.tokenizer.add_tokens(list(tags))
        self.tokenizer.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "config.json").read_text())
        config.update(max_position_embeddings=_LENGTH, vocab_size=_VOCABULARY)
        (folder / "config.json").write_text(json.dumps(config))
        self.prompts: list[str] = []  # prompts of the requests so far
        self._last: list[int] | None = None
        self._script: list[int] = []
        self._next: list[list[int]] = []

    def say(self, *texts: str) -> None:
        """Set the texts of the next answers. The last one is also that of all further answers."""
        self._last, self._next = None, [self.tokenizer.encode(text).ids for text in texts]

    def model(self) -> ScriptedModel:
        return ScriptedModel(
            self._next_token, vocab_size=_VOCABULARY, max_position_embeddings=_LENGTH
        )

    def _next_token(self, history: list[int]) -> int:
        if history[:-1] != self._last:  # another request begins
            self._begin = len(history)
            self._script = self._next.pop(0) if self._next else self._script
            self.prompts.append(self.tokenizer.decode(history, skip_special_tokens=False))
        self._last = history
        done = len(history) - self._begin
        return self._script[done] if done < len(self._script) else 0
