"""`ChatModel`: answers the messages of a chat with a manager of its own.

It decides the sampling and the length of an answer. It neither reads nor writes the terminal.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gptmanager.callbacks import ChatTemplate, RequestQueue, broadcast, load_tokenizer
from gptmanager.callbacks.answers.reasoning import (
    AnswerStart,
    Reasoning,
    reasoning_of,
    special_tags,
    with_thoughts,
)
from gptmanager.callbacks.longest_request import longest_request
from gptmanager.callbacks.text.checkpoint import (
    read_tokenizer_config,
    sampling_defaults,
    special_tokens_of,
)
from gptmanager.callbacks.text.stop_strings import checked_stops
from gptmanager.callbacks.text.template_process import (
    pick,
    read_chat_templates,
    read_template_file,
)
from gptmanager.commands.chat.answers import Answers
from gptmanager.config import ModelType
from gptmanager.errors import CapacityError, ConfigError, InvalidRequestError, quoted_path
from gptmanager.manager.gpt_manager import GptManager
from gptmanager.models.checkpoint_parts import open_tensors
from gptmanager.models.hf.sizes import read_sizes
from gptmanager.terminal.options import ManagerOptions
from gptmanager.terminal.sampling import SAMPLING_VALUES, given_sampling

# Used if the checkpoint gives no sampling values. With greedy decoding, small models repeat text.
_DEFAULTS = {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1}
_VARIABLES = ("enable_thinking", "reasoning_effort")  # options that are variables of templates
_END = 64  # tokens at the end of a prompt in which a tag of thoughts is looked for


class ChatModel:
    """A model with its chat template. `context_size`: the most tokens of a prompt plus answer.

    `reasoning` is the format of the model's thoughts. `variables` are passed to the template.
    `tokenizer` decodes the end of a prompt, which may begin or end a thought.
    """

    def __init__(
        self,
        queue: RequestQueue,
        template: ChatTemplate,
        context_size: int,
        max_new_tokens: int,
        request_options: Mapping[str, Any],
        reasoning: Reasoning = Reasoning.NONE,
        variables: Mapping[str, Any] | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.context_size = context_size
        self._queue = queue
        self._template = template
        self._max_new_tokens = max_new_tokens
        self._request_options = request_options
        self._reasoning = reasoning
        self._variables = variables
        self._tokenizer = tokenizer

    @property
    def samples(self) -> bool:
        """Whether two answers to a question may differ."""
        options = self._request_options
        is_greedy = options.get("runtime_top_k") == 1 or options.get("runtime_top_p") == 0
        return bool(options["temperature"]) and not is_greedy

    def start(self, messages: Sequence[Mapping[str, str]], count: int) -> Answers:
        """Begin `count` answers to the last message, each as a request of its own.

        Raises InvalidRequestError if the chat template refuses the messages. Raises CapacityError
        if the messages leave no room for an answer, or if the template's process cannot be started.
        """
        shown = with_thoughts(messages, self._reasoning)
        prompt = self._template.render(shown, variables=self._variables)
        if not prompt:
            raise InvalidRequestError("the chat template renders these messages as an empty prompt")
        room = self.context_size - len(prompt)
        if room < 1:
            raise CapacityError(
                f"the conversation has {len(prompt):,} tokens with this message, and must have at "
                f"most {self.context_size - 1:,} to leave room for an answer: shorten the message, "
                "or begin a new conversation with /clear"
            )
        length = min(room, self._max_new_tokens)
        submit = partial(self._queue.submit, prompt, length, is_streaming=True)
        start = self._start_of_answer(prompt)
        parsers = [start.parser(None, None) for _ in range(count)]
        return Answers([submit(**self._request_options) for _ in range(count)], parsers)

    def _start_of_answer(self, prompt: Sequence[int]) -> AnswerStart:
        if self._tokenizer is None or self._reasoning is Reasoning.NONE:
            return AnswerStart()
        end = self._tokenizer.decode(prompt[-_END:], skip_special_tokens=False)
        return AnswerStart.of_prompt(self._reasoning, end, None)


@contextmanager
def open_chat_model(options: argparse.Namespace, given: ManagerOptions) -> Iterator[ChatModel]:
    """Load the model that the command's options name.

    Raises ConfigError for wrong options or a wrong file.
    """
    path: Path = options.model
    sizes = read_sizes(path, given.params.model_backend, given.params.max_seq_len)
    request_options = {"stop": checked_stops(options.stop), **_sampling(options)}
    params = given.params
    # If a folder lacks both weights and the chat template, report the weights. The manager would
    # check the weights only after the template was read.
    open_tensors(path).close()
    templates = _templates(path, options.chat_template)
    template_text = pick(templates, has_tools=False) or ""
    variables = _template_variables(options, template_text)
    reasoning = reasoning_of("auto", template_text)
    tokenizer = load_tokenizer(path)
    special_tokens = special_tokens_of(read_tokenizer_config(path))
    with (
        ChatTemplate(templates, tokenizer, special_tokens) as template,
        RequestQueue.for_checkpoint(
            path,
            exclude_input_in_output=True,
            tokenizer=tokenizer,
            special_texts=special_tags(tokenizer, reasoning.tags),
        ) as queue,
    ):
        get: Any = queue.get_inference_requests
        poll: Any = queue.poll_stop_signal
        if params.parallel_config is not None:
            get, poll = broadcast(get, poll)
        given_model = path, given.model_type, 1, given.scheduler
        with GptManager(*given_model, get, queue.send_response, poll, None, params) as manager:
            queue.attach(manager)
            size = longest_request(manager, sizes.max_seq_len)
            yield ChatModel(
                queue,
                template,
                size,
                options.max_new_tokens,
                request_options,
                reasoning,
                variables,
                tokenizer,
            )


def for_chats(given: ManagerOptions) -> ManagerOptions:
    """Return the options with block reuse and chunked context, unless the model type is V1.

    Block reuse keeps the KV cache of earlier messages. With chunked context, a prompt may be as
    long as the model's context.
    """
    is_v1 = given.model_type is ModelType.V1  # supports neither
    cache = replace(given.params.kv_cache_config, enable_block_reuse=False if is_v1 else None)
    params = replace(
        given.params,
        kv_cache_config=cache,
        enable_chunked_context=None if is_v1 else True,
        exclude_input_in_output=True,
    )
    return given._replace(params=params)


def _templates(path: Path, file: Path | None) -> dict[str, str]:
    templates = read_chat_templates(path) if file is None else read_template_file(file)
    if not templates:
        raise ConfigError(
            f"{quoted_path(path)} has no chat template: pass one with --chat-template FILE, or "
            "continue texts with `gptmanager run --prompt`"
        )
    return templates


def _template_variables(options: argparse.Namespace, template: str) -> dict[str, Any]:
    """Return the variables that the options set. Raise ConfigError if the template uses none."""
    given = {name: getattr(options, name) for name in _VARIABLES}
    given = {name: value for name, value in given.items() if value is not None}
    for name in given:
        if name not in template:
            raise ConfigError(
                f"--{name.replace('_', '-')} has no effect, because the chat template has no such "
                "variable: leave the option out"
            )
    return given


def _sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Return the sampling values of every request: the options, or else the checkpoint's values."""
    defaults = sampling_defaults(options.model) or _DEFAULTS
    chosen = {"temperature": 1.0, **defaults, **given_sampling(options)}
    return {SAMPLING_VALUES[name].tensor: value for name, value in chosen.items()}
