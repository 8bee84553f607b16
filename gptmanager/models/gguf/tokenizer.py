"""Creates the tokenizer of a GGUF file: byte-level BPE, or SentencePiece with byte fallback.

The tokenizer returns the same token ids as llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from gptmanager.errors import ConfigError, error_summary, quoted, quoted_path
from gptmanager.models.gguf.header import Header
from gptmanager.models.gguf.metadata import Metadata
from gptmanager.models.gguf.pre_tokenizers import PRE_TOKENIZERS
from gptmanager.models.gguf.tokens import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)

_GGML = "tokenizer.ggml."
_SPACE = "\u2581"  # SentencePiece's symbol for a space
_MAX_SPLITS = 1 << 28  # limit of steps to find merges; real vocabularies need 10 million


def load_gguf_tokenizer(header: Header) -> Tokenizer:
    """Create the tokenizer. Raises ConfigError for an unsupported kind or an invalid vocabulary."""
    metadata, vocabulary = Metadata(header.path, header.metadata), read_vocabulary(header)
    if vocabulary is None:
        raise ConfigError(f"{quoted_path(header.path)} holds no tokenizer: pass token ids")
    kind = metadata.text(f"{_GGML}model")
    makers = {"gpt2": _byte_level, "llama": _sentence_piece, "gemma4": _gemma4}
    if kind not in makers:
        raise metadata.error(f"{_GGML}model", f"not supported; supported: {', '.join(makers)}")
    try:
        tokenizer, add_bos = makers[kind](metadata, vocabulary)
        tokenizer.add_tokens(_added_tokens(metadata, vocabulary))
        _frame(tokenizer, metadata, vocabulary, add_bos)
    except BaseException as error:  # plain Exceptions, and Rust panics, which are BaseExceptions
        if isinstance(error, (ConfigError, KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(
            f"{quoted_path(header.path)}: cannot create a tokenizer from {_GGML}*: "
            f"{error_summary(error)}"
        ) from error
    return tokenizer


def _byte_level(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a byte-level BPE tokenizer, and whether to add a BOS token if the file does not have
    `add_bos_token`.
    """
    name = metadata.text(f"{_GGML}pre") or "default"
    if name not in PRE_TOKENIZERS:
        raise ConfigError(
            f"{metadata.path}: {_GGML}pre = {quoted(name)}: this pre-tokenizer is not supported; "
            f"supported: {', '.join(PRE_TOKENIZERS)}"
        )
    own = PRE_TOKENIZERS[name]
    tokenizer = Tokenizer(_merging(metadata, vocabulary, ignore_merges=own.ignore_merges))
    splits = [pre_tokenizers.Split(Regex(one), "isolated") for one in own.patterns]
    alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, alphabet])
    tokenizer.decoder = decoders.ByteLevel()
    if metadata.flag(f"{_GGML}add_space_prefix", False):
        tokenizer.normalizer = normalizers.Prepend(" ")
    return tokenizer, own.add_bos


def _merging(metadata: Metadata, vocabulary: Vocabulary, **options: Any) -> BPE:
    """Return a BPE model with the merges of the file."""
    by_text, merges = _by_text(vocabulary), metadata.texts(f"{_GGML}merges")
    pairs = [(it[:cut], it[cut + 1 :]) for it in merges if (cut := it.find(" ", 1)) > 0]
    try:
        return BPE(by_text, pairs, **options)
    except Exception:  # BPE rejects merges with strings that are not tokens
        known = by_text.keys()
        return BPE(by_text, [pair for pair in pairs if {*pair, "".join(pair)} <= known], **options)


def _gemma4(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a BPE tokenizer that splits a text into lines, with byte fallback and the file's
    merges. The second value: see `_byte_level`.
    """
    own = {"unk_token": vocabulary.text("unknown"), "fuse_unk": True, "byte_fallback": True}
    tokenizer = Tokenizer(_merging(metadata, vocabulary, **own))
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|[\n]+"), "isolated")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer, True


def _sentence_piece(metadata: Metadata, vocabulary: Vocabulary) -> tuple[Tokenizer, bool]:
    """Return a BPE tokenizer that merges within the whole text. The pair that makes the token with
    the best score is merged first. The second value: see `_byte_level`.
    """
    scores = metadata.numbers(f"{_GGML}scores", len(vocabulary.texts))
    by_text = _by_text(vocabulary)
    model = BPE(
        by_text,
        _merges(metadata, vocabulary, by_text, scores),
        unk_token=vocabulary.text("unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    has_prefix = metadata.flag(f"{_GGML}add_space_prefix", True)
    prefix = [normalizers.Prepend(_SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*prefix, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer, True


def _merges(
    metadata: Metadata, vocabulary: Vocabulary, by_text: Mapping[str, int], scores: list[float]
) -> list[tuple[str, str]]:
    """Return all pairs of tokens that merge to another token, highest score first."""
    kinds = zip(vocabulary.texts, vocabulary.types, scores, strict=True)
    made = [(text, score) for text, kind, score in kinds if kind in (NORMAL, USER_DEFINED)]
    if sum(len(text) ** 2 for text, _ in made) > _MAX_SPLITS:
        raise metadata.error(f"{_GGML}tokens", "the tokens are too long to find their merges")
    found = []
    for text, score in made:
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in by_text and right in by_text:
                found.append((-score, by_text[left], by_text[right], left, right))
    found.sort(key=lambda merge: merge[:3])
    return [(left, right) for *_, left, right in found]


def _by_text(vocabulary: Vocabulary) -> dict[str, int]:
    return {text: number for number, text in enumerate(vocabulary.texts)}


def _added_tokens(metadata: Metadata, vocabulary: Vocabulary) -> list[AddedToken]:
    """Return the tokens that are matched in a text before all others."""
    # Phi 3 drops spaces after most of these tokens. As in llama.cpp, `general.name` shows whether
    # the model is Phi 3.
    name = (metadata.text("general.name") or "").lower()
    strips = "phi-3" in name or "phi3" in name
    kept = ("<unk>", "<s>", "<|endoftext|>")
    return [
        AddedToken(
            text,
            special=kind != USER_DEFINED,
            normalized=False,
            rstrip=strips and text not in kept,
        )
        for text, kind in zip(vocabulary.texts, vocabulary.types, strict=True)
        if text and kind in (CONTROL, UNKNOWN, USER_DEFINED)
    ]


def _frame(tokenizer: Tokenizer, metadata: Metadata, vocabulary: Vocabulary, add_bos: bool) -> None:
    """Make the tokenizer add the BOS and EOS tokens that the file asks for.

    `add_bos`: whether to add a BOS token if the file does not have `add_bos_token`.
    """
    begins = metadata.flag(f"{_GGML}add_bos_token", add_bos)
    ends = metadata.flag(f"{_GGML}add_eos_token", False)
    wanted = [("bos", begins), ("eos", ends)]
    found = {role: vocabulary.ids[role] for role, on in wanted if on and role in vocabulary.ids}
    if found:
        shape = [*(["bos"] if "bos" in found else []), "$A", *(["eos"] if "eos" in found else [])]
        pairs = [(role, number) for role, number in found.items()]
        tokenizer.post_processor = TemplateProcessing(
            single=shape, pair=[*shape, "$B"], special_tokens=pairs
        )
