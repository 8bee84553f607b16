"""`ServerSettings`: the checked options of `gptmanager serve`."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from gptmanager.config import ModelType, OptionalParams, PromptLookup, SchedulerConfig
from gptmanager.errors import ConfigError
from gptmanager.server.chat_settings import ChatSettings
from gptmanager.server.http.access import AccessSettings
from gptmanager.server.model_settings import ModelSettings
from gptmanager.terminal.options import ManagerOptions


def _manager() -> ManagerOptions:
    return ManagerOptions(ModelType.INFLIGHT_FUSED_BATCHING, SchedulerConfig(), OptionalParams())


@dataclass(frozen=True, kw_only=True)
class ServerSettings(AccessSettings, ModelSettings, ChatSettings):
    """The options of `gptmanager serve`, by name. Raises ConfigError for a wrong value.

    `max_concurrency`: the maximum number of requests that run at once; by default, as many as fit
    into a batch, or into two batches with `enable_trt_overlap`. `max_queued_requests`: the maximum
    number of waiting requests. `max_queued_tokens`: the maximum number of prompt tokens of all
    waiting requests together; None means no limit. `request_timeout`: seconds after which a request
    is ended; None means no limit. `shutdown_timeout`: seconds that running requests may take after
    a signal. `triton`: serve Triton's protocol at /v2; `grpc_port` implies this. `lenient`: an
    unknown field causes a warning instead of an error. `clamp_max_tokens`: if more tokens are
    requested than fit, their number is lowered with a warning instead of an error. `log_format`:
    text or json. `log_prompts`: the log contains prompts and outputs. `manager`: the manager's
    options.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    max_concurrency: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    request_timeout: float | None = None
    shutdown_timeout: float = 20.0
    log_format: str = "text"
    log_prompts: bool = False
    lenient: bool = False
    clamp_max_tokens: bool = False
    triton: bool = False
    grpc_port: int | None = None
    metrics_prefix: str = "gptmanager"
    manager: ManagerOptions = field(default_factory=_manager)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_minimum(
            max_concurrency=1,
            max_queued_requests=0,
            max_queued_tokens=0,
            max_beam_width=1,
            max_adapters=1,
            request_timeout=0,
            shutdown_timeout=0,
        )
        if self.request_timeout == 0:
            raise ConfigError("request_timeout = 0 must be more than 0: leave it out for no limit")
        for name in ("port", "grpc_port"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < 1 << 16:
                raise ConfigError(f"{name} = {value} must be 0 to 65535; 0 means any free port")
        if self.uds is None and self.port and self.port == self.grpc_port:
            raise ConfigError(f"port and grpc_port are both {self.port}: they must differ")
        parsers = (self.reasoning_parser, self.tool_call_parser)
        if "harmony" in parsers and not set(parsers) <= {"auto", "harmony"}:
            raise ConfigError(
                f"reasoning_parser = {parsers[0]} and tool_call_parser = {parsers[1]} do not fit "
                "together: use harmony for both"
            )
        if self.chat_template is not None and not os.path.isfile(self.chat_template):
            raise ConfigError(f"chat_template = {self.chat_template} must be a file that exists")
        self._check_names()

    @property
    def serves_triton(self) -> bool:
        """Whether the server serves Triton's protocol."""
        return self.triton or self.grpc_port is not None

    @property
    def concurrency(self) -> int:
        """The number of requests that may run at once."""
        if self.max_concurrency is not None:
            return self.max_concurrency
        params = self.manager.params
        return params.max_batch_size * (2 if params.enable_trt_overlap else 1)

    @property
    def params(self) -> OptionalParams:
        """The manager's parameters, completed by the server's options."""
        given = self.manager
        is_off = self.block_reuse is None and given.model_type is ModelType.V1
        reuse = False if is_off else self.block_reuse
        cache = replace(given.params.kv_cache_config, enable_block_reuse=reuse)
        if self.host_tier_bytes is not None:
            cache = replace(cache, host_cache_size=self.host_tier_bytes)
        lookup = None if self.prompt_lookup is None else PromptLookup(self.prompt_lookup)
        return replace(
            given.params,
            kv_cache_config=cache,
            max_active_requests=self.concurrency,
            exclude_input_in_output=True,
            speculative_decoding_config=lookup,
            recording_path=self.record,
            journal_path=self.journal,
            journal_sync=self.journal_sync,
            journal_on_full=self.journal_on_full,
        )
