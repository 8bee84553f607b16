"""The end tokens and the tokenizer of a checkpoint folder.

The manager does not read them, because the application decides which tokens end an output. This
module makes the usual choice.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tokenizers import AddedToken, Tokenizer

from gptmanager import InferenceRequest
from gptmanager.arguments import at_least
from gptmanager.errors import ConfigError, error_summary, quoted
from gptmanager.memory.checkpoint.untrusted_files import check_file, read_object
from gptmanager.models.checkpoint_parts import gguf_checkpoint, read_part
from gptmanager.models.other_folders import describe_other
from gptmanager.request.read_tensors import MAX_END_IDS

# files of tokenizers in other formats
_OTHER_TOKENIZERS = ("tokenizer.model", "tekken.json", "vocab.json", "spiece.model", "vocab.txt")
_OPTIONS = ("single_word", "lstrip", "rstrip", "normalized", "special")  # options of an added token
_R = TypeVar("_R")
_NAMED = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_MAX_TOKENIZER_BYTES = 256 << 20
_MAX_ID = 2**31 - 1


@dataclass(frozen=True)
class TokenDefaults:
    """The `end_id` and `pad_id` of requests without these tensors.

    Each of `end_ids` ends an output. All of them are banned until `min_length` is reached.
    """

    end_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    @classmethod
    def of_folder(cls, folder: str | os.PathLike[str]) -> TokenDefaults:
        """Read `generation_config.json`, or else `config.json`, as transformers does.

        Ids outside of the vocabulary end no output, and are left out. Raise ConfigError if the path
        is neither a folder nor a GGUF file, or if a value is not a token id.
        """
        for name in ("generation_config.json", "config.json"):
            if (config := read_part(folder, name)) is not None:
                found = cls.of_config(config, str(Path(folder) / name))
                return replace(found, end_ids=_in_vocabulary(found.end_ids, Path(folder)))
        if not os.path.isdir(folder):
            raise ConfigError(
                f"{quoted(os.fspath(folder))} is not a folder: pass a checkpoint folder or a GGUF "
                f"file ({describe_other(Path(folder))})"
            )
        return cls()

    @classmethod
    def of_config(cls, config: Mapping[str, Any], where: str = "config.json") -> TokenDefaults:
        """Read the keys `eos_token_id` (an id, or a list) and `pad_token_id`.

        The config of a multimodal model may have these keys in its `text_config` only. Raise
        ConfigError for a value that is not a token id; the error names the file `where`.
        """
        inner = config.get("text_config")
        sources = [config, *([inner] if isinstance(inner, Mapping) else [])]
        end_ids, pad_id = (
            next((it[key] for it in sources if it.get(key) is not None), None)
            for key in ("eos_token_id", "pad_token_id")
        )
        listed = end_ids if isinstance(end_ids, (list, tuple)) else [end_ids]
        if end_ids is not None and not (len(listed) <= MAX_END_IDS and all(map(_is_id, listed))):
            raise ConfigError(
                f"{where}: eos_token_id = {quoted(end_ids)} must be a token id, or a list of at "
                f"most {MAX_END_IDS}"
            )
        if pad_id is not None and not _is_id(pad_id):
            raise ConfigError(f"{where}: pad_token_id = {quoted(pad_id)} must be a token id")
        return checked_defaults(end_ids, pad_id)

    def fill(self, request: InferenceRequest) -> None:
        """Set `end_id` and `pad_id` on `request` where they are missing."""
        if self.pad_id is not None and "pad_id" not in request.tensors:
            request.pad_id = np.array([self.pad_id], dtype=np.int32)
        if self.end_ids and "end_id" not in request.tensors:
            request.end_id = np.array(self.end_ids, dtype=np.int32)


def sampling_defaults(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the sampling values in `generation_config.json`, by their names there.

    If `do_sample` is false, the temperature is 0, and `top_k`, `top_p` and `min_p` are left out.
    """
    config = read_part(folder, "generation_config.json") or {}
    found = {name: config[name] for name in _SAMPLING if config.get(name) is not None}
    if config.get("do_sample") is not False:
        return found
    return {name: found[name] for name in found if name == "repetition_penalty"} | {
        "temperature": 0.0
    }


def _in_vocabulary(ids: tuple[int, ...], folder: Path) -> tuple[int, ...]:
    """Return the ids below the vocabulary size that a folder's config.json names, if any."""
    file = folder / "config.json"
    config = read_object(file) if ids and os.path.lexists(file) else {}
    inner = config.get("text_config")
    size = (inner if isinstance(inner, Mapping) else config).get("vocab_size")
    return tuple(it for it in ids if it < size) if isinstance(size, int) else ids


def checked_defaults(
    default_end_id: int | Iterable[int] | None, default_pad_id: int | None
) -> TokenDefaults:
    """Return the defaults for one end id or several. Raise ConfigError for ids outside int32.

    An end id of -1 has no effect.
    """
    given = default_end_id
    ids = () if given is None else given if isinstance(given, Iterable) else (given,)
    end_ids = tuple(at_least(-1, "default_end_id", one, _MAX_ID) for one in ids)
    if default_pad_id is not None:
        at_least(~_MAX_ID, "default_pad_id", default_pad_id, _MAX_ID)
    return TokenDefaults(end_ids, default_pad_id)


def special_tokens_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in a tokenizer_config.json, by key (`bos_token`)."""
    found = {}
    for key, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(content, str):
            found[key] = content
    return found


def read_tokenizer_config(folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Return tokenizer_config.json with the special tokens of special_tokens_map.json.

    As in transformers, the second file is read only if the first one does not list added tokens.
    """
    config = read_part(folder, "tokenizer_config.json") or {}
    if config.get("added_tokens_decoder") is None:
        config = {**config, **(read_part(folder, "special_tokens_map.json") or {})}
    return config


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Return whether a checkpoint has a tokenizer, without a check that it can be read."""
    gguf = gguf_checkpoint(path)
    return os.path.lexists(Path(path) / "tokenizer.json") if gguf is None else gguf.has_tokenizer()


def load_tokenizer(folder: str | os.PathLike[str]) -> Tokenizer:
    """Return the tokenizer of a checkpoint folder or a GGUF file.

    As in transformers, the tokenizer never truncates or pads texts, even if its file says so. Raise
    ConfigError if the checkpoint has no tokenizer, or one that cannot be read.
    """
    if (gguf := gguf_checkpoint(folder)) is not None:
        return gguf.tokenizer()
    path = Path(folder) / "tokenizer.json"
    if not os.path.lexists(path):
        where = quoted(os.fspath(folder))
        if not os.path.isdir(folder):
            raise ConfigError(
                f"{where} is not a folder: pass one with a tokenizer.json "
                f"({describe_other(Path(folder))})"
            )
        raise ConfigError(
            f"{where} has no tokenizer.json, which text prompts need: {_how_to_make(Path(folder))}"
        )
    check_file(path, _MAX_TOKENIZER_BYTES)
    try:
        # not `from_file`, which refuses a path that is not UTF-8
        tokenizer = Tokenizer.from_buffer(path.read_bytes())
    except BaseException as error:  # a panic of Rust is not an Exception
        if isinstance(error, (KeyboardInterrupt, SystemExit)):
            raise
        raise ConfigError(f"{path} is not a tokenizer: {error_summary(error)}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.add_tokens(_further_tokens(folder, tokenizer))
    return tokenizer


def _how_to_make(folder: Path) -> str:
    """Return what to do about a folder without a tokenizer.json."""
    found = next((it for it in _OTHER_TOKENIZERS if os.path.lexists(folder / it)), None)
    if found is None:
        return "pass token ids, or a tokenizer"
    return (
        f"it has {found}, from which transformers makes one: "
        "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
    )


def _further_tokens(folder: str | os.PathLike[str], tokenizer: Tokenizer) -> list[AddedToken]:
    """Return the added and special tokens of a folder that its tokenizer.json has not.

    Added tokens are in tokenizer_config.json, or else in added_tokens.json. As in transformers,
    they are followed by the special tokens, and each gets the next free id, unless it is in the
    vocabulary. A token with other options than in tokenizer.json replaces that one, and so does a
    special token that has a name, such as `pad_token`, and is not special in tokenizer.json.
    """
    config = read_tokenizer_config(folder)
    special = _read(folder, "special tokens", _special_tokens, config)
    listed = config.get("added_tokens_decoder")
    name = "tokenizer_config.json: added_tokens_decoder"
    known = {it.content: it for it in tokenizer.get_added_tokens_decoder().values()}
    if listed is None:
        name, given = "added_tokens.json", read_part(folder, "added_tokens.json") or {}
        texts = given.keys() - known.keys()  # tokenizer.json has precedence over this file
        pairs = [(given[it], {"content": it, "special": it in special}) for it in texts]
        numbered = _read(folder, name, _numbered, pairs)
    else:
        numbered = _read(folder, name, lambda own: _numbered(own.items()), listed)
    found: dict[str, AddedToken] = {}
    for _, token in sorted(numbered.items()):
        if repr(token) != repr(known.get(token.content)):
            token.special = token.special or token.content in special
            found.setdefault(token.content, token)
    named = special_tokens_of(config).values()  # these are special in any case
    plain = {text for text in named if text in known and not known[text].special}
    missing = (special.keys() - known.keys() | plain) - found.keys()
    return [*found.values(), *(it for text, it in special.items() if text in missing)]


def _read(folder: str | os.PathLike[str], name: str, read: Callable[[Any], _R], given: Any) -> _R:
    """Return what `read` returns for `given`. Raise ConfigError if a value has a wrong type."""
    try:
        return read(given)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
        raise ConfigError(f"{quoted(os.fspath(folder))}: {name}: {error_summary(error)}") from None


def _numbered(pairs: Iterable[tuple[Any, Mapping[str, Any]]]) -> dict[int, AddedToken]:
    return {int(number): _added_token(own) for number, own in pairs}


def _special_tokens(config: Mapping[str, Any]) -> dict[str, AddedToken]:
    """Return text -> special token, in the order in which transformers adds them."""
    extra = config.get("extra_special_tokens", config.get("additional_special_tokens"))
    named = {it: config.get(it) for it in _NAMED}
    named |= {key: it for key, it in config.items() if key.endswith("_token")}
    for own in (extra, config.get("model_specific_special_tokens")):
        named |= own if isinstance(own, dict) else {}
    listed = [*named.values(), *(extra if isinstance(extra, list) else ())]
    objects = ({"content": it} if isinstance(it, str) else it for it in listed)
    tokens = (
        _added_token({**it, "special": True})
        for it in objects
        if isinstance(it, dict) and isinstance(it.get("content"), str)
    )
    return {it.content: it for it in tokens}


def _added_token(own: Mapping[str, Any]) -> AddedToken:
    return AddedToken(own["content"], **{it: own[it] for it in _OPTIONS if it in own})


def _is_id(value: Any) -> bool:
    """Return whether `value` is a token id, or -1, which some checkpoints use for None."""
    return type(value) is int and -1 <= value < 2**31
