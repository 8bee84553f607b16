"""Errors of commands name the options that set a manager's parameters, not the parameters.

For example, `KvCacheConfig.max_tokens = 1` becomes `--kv-cache-tokens = 1`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping

# field -> `dest` of the option that sets it, where the two differ
_OTHER_NAMES = {
    "KvCacheConfig.max_tokens": "kv_cache_tokens",
    "KvCacheConfig.dtype": "kv_cache_dtype",
    "KvCacheConfig.enable_block_reuse": "block_reuse",
    "KvCacheConfig.host_cache_size": "host_tier_bytes",
    "OptionalParams.enable_chunked_context": "chunked_context",
    "OptionalParams.enable_trt_overlap": "overlap",
    "OptionalParams.journal_path": "journal",
    "OptionalParams.max_active_requests": "max_concurrency",
    "OptionalParams.recording_path": "record",
    "OptionalParams.speculative_decoding_config": "prompt_lookup",
    "PromptLookup.max_draft_tokens": "prompt_lookup",
    "SchedulerConfig.capacity_scheduler_policy": "policy",
}
_WITHOUT_CLASS = {
    name: dest
    for name, dest in ((field.partition(".")[2], dest) for field, dest in _OTHER_NAMES.items())
    if name not in ("dtype", "max_tokens")  # also names of other fields
}
_CLASSES = "|".join(
    ("OptionalParams", "KvCacheConfig", "SchedulerConfig", "ParallelConfig", "PromptLookup")
)
_FIELD = re.compile(
    rf"(?<![\w./'\"-])(?:({_CLASSES})\.)?([a-z]+(?:_[a-z]+)*)\b(?![-/(]|\.\w)( = (?:True|False)\b)?"
)
_OF_FILE = re.compile(r"\.jsonl?['\"]?: $")
_BATCHING = re.compile(r"\bModelType\.([A-Z]\w*)")


def in_options(text: str, actions: Iterable[argparse.Action]) -> str:
    """Return an error with the options of `actions` in place of the fields that they set.

    A name without its class and without an underscore is also a common word. It is replaced only at
    the start of the text or after "with" or "needs", and before a value. A name after that of a
    JSON file is a key of this file.
    """
    options = {it.dest: it for it in actions if it.option_strings}

    def replaced(found: re.Match[str]) -> str:
        config, name, switched = found.groups()
        if config is None and not _is_field(found):
            return found[0]
        other = _WITHOUT_CLASS.get(name) if config is None else _OTHER_NAMES.get(f"{config}.{name}")
        option = options.get(other or name)
        if option is None:
            return found[0]
        is_switch = option.nargs == 0 and (switched or "").endswith("True")
        return option.option_strings[0] + ("" if is_switch else switched or "")

    if "batching" in options:
        text = _BATCHING.sub(_batching, text)
    return _FIELD.sub(replaced, text)


def _is_field(found: re.Match[str]) -> bool:
    before, after = found.string[: found.start()], found.string[found.end() :]
    if "_" in found[2]:
        return _OF_FILE.search(before) is None
    return (not before or before.endswith((" with ", " needs "))) and after.startswith(
        (" = ", ": ", " and ")
    )


def _batching(found: re.Match[str]) -> str:
    return f"--batching {found[1].lower().removesuffix('_batching')}"


def with_origin(text: str, origins: Mapping[str, str]) -> str:
    """Return an error, extended by the origins of the options that it names.

    `origins` maps the `dest` of an option to a description of where its value is from.
    """
    named = [
        origin
        for name, origin in origins.items()
        if re.search(rf"--{name.replace('_', '-')}\b(?!-)|^{name}\b|\b{name} = ", text)
    ]
    return f"{text} ({', '.join(named)})" if named else text
