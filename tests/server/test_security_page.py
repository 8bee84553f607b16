"""docs/security.md: the limits that it lists are those of the code."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from gptmanager.callbacks import LivePage
from gptmanager.callbacks.processors import banned_texts
from gptmanager.callbacks.text import stop_strings, template_process
from gptmanager.decoding.guided import guided
from gptmanager.server import errors, log_output
from gptmanager.server.chat import chat_prompt, tools
from gptmanager.server.engine import kept_calls
from gptmanager.server.http import access, body, http_protocol, json_text, key_file, request_log
from gptmanager.server.http.body import LARGE_BODY
from gptmanager.server.openai import completions, response_store
from gptmanager.server.settings import ServerSettings
from gptmanager.server.text import generation_fields
from gptmanager.server.triton import token_model
from gptmanager.terminal import option_sources

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "security.md").read_text(encoding="utf-8")


def limits():
    """What is limited -> (default, option)."""
    table = PAGE.partition("## Limits\n")[2].partition("\n\nA body")[0]
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    return {what: (default, option.strip("`")) for what, default, option in rows[2:]}


def amount(bytes_):
    return f"{bytes_ >> 20} MiB" if bytes_ >> 20 else f"{bytes_ >> 10} KiB"


def default(name):
    value = ServerSettings.__dataclass_fields__[name].default
    return "no limit" if value is None else f"{value:,.0f}"


def in_code():
    """The same as the code has it: default, and the field of the option."""
    fixed = {
        "requests of one connection that wait": http_protocol.MAX_PIPELINED,
        "prompts of a completion": completions.MAX_PROMPTS,
        "choices of a prompt": generation_fields.MAX_CHOICES,
        "log probabilities of a token": generation_fields.MAX_TOP_LOG_PROBS,
        "texts in `stop`": stop_strings.MAX_STOPS,
        "tokens in `logit_bias`": generation_fields.MAX_BIASES,
        "tools": tools.MAX_TOOLS,
        "documents": chat_prompt.MAX_DOCUMENTS,
        "characters of a prompt and of an output": request_log.MAX_LOGGED_LETTERS,
        "lines of the log": log_output.MAX_WAITING_LINES,
        "browsers on the live page": LivePage()._max_viewers,
    }
    set_by = {
        "seconds for a request to arrive": "read_timeout",
        "seconds that an idle connection": "keep_alive_timeout",
        "connections from one address": "max_connections_per_address",
        "requests that wait": "max_queued_requests",
        "tokens of prompts that wait": "max_queued_tokens",
        "seconds of a request": "request_timeout",
        "beams": "max_beam_width",
        "adapters that clients have loaded": "max_adapters",
    }
    json_limits = (
        f"{amount(json_text.MAX_JSON_BYTES)}; {json_text.MAX_VALUES:,}; "
        f"{json_text.MAX_CONTAINERS:,}"
    )
    most = inspect.signature(guided.GuidedDecoding).parameters["max_grammars"].default
    grammars = f"{most}, with texts of {amount(guided.MAX_KEPT_BYTES)}"
    template = f"{template_process.MAX_SECONDS:g}, and {amount(template_process.MAX_BYTES)}"
    logged = f"{request_log.MAX_ID_LETTERS}; {request_log.MAX_PATH_LETTERS}"
    of_store = response_store.MAX_RESPONSES, response_store.MAX_BYTES, response_store.MAX_AGE_S
    stored = f"{of_store[0]:,}; {amount(of_store[1])}; {of_store[2]:,.0f}"
    of_calls = kept_calls.MAX_KEYS, kept_calls.MAX_BYTES, kept_calls.KEEP_S
    kept = f"{of_calls[0]:,}; {amount(of_calls[1])}; {of_calls[2]:,.0f}"
    files = f"{amount(key_file.MAX_BYTES)}; {amount(option_sources.MAX_FILE_BYTES)}"
    return {
        **{what: (f"{value:,}", None) for what, value in fixed.items()},
        **{what: (default(name), name) for what, name in set_by.items()},
        "requests of a key": ("no limit", "api_key_file"),
        "bytes of the key file": (files, None),
        "bytes of a body": (amount(access.TEXT_BYTES), "max_body_bytes"),
        "bytes of a body that may carry": (amount(access.TENSOR_BYTES), "max_body_bytes"),
        "bytes of all bodies": (f"{body.MAX_BODIES_BYTES >> 20:,} MiB", None),
        "bytes of JSON": (json_limits, None),
        "characters of an `X-Request-Id`": (logged, None),
        "stored responses": (stored, None),
        "calls kept by their `Idempotency-Key`": (kept, None),
        "bytes of the logits": (amount(token_model.MAX_LOGITS_BYTES), None),
        "bytes of all lists in `bad_words`": (amount(banned_texts._MAX_SIZE), None),
        "bytes of the request line": (amount(http_protocol.MAX_HEAD_BYTES), None),
        "connections": ("three quarters of the descriptors", "max_connections"),
        "requests that run": ("as many as fit a batch", "max_concurrency"),
        "tokens of a prompt and its output": ("`max_model_len`", "max_seq_len"),
        "compiled grammars that are kept": (grammars, None),
        "seconds, and bytes of memory": (template, None),
    }


def test_the_page_lists_the_limits_of_the_code():
    code, listed = in_code(), limits()
    assert len(code) == len(listed)
    for what, expected in listed.items():
        begin = max((name for name in code if what.startswith(name)), key=len)
        value, name = code.pop(begin)
        option = "-" if name is None else "--" + name.replace("_", "-")
        assert expected == (value, option), what
    assert f"A body of {amount(LARGE_BODY)} or more is parsed" in PAGE
    assert f"at most {errors.LONGEST:,} characters" in PAGE
