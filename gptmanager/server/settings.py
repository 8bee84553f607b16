"""`ServerSettings`: the checked options of `gptmanager serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from gptmanager.config import ModelType, OptionalParams, PromptLookup, SchedulerConfig
from gptmanager.errors import ConfigError
from gptmanager.server.chat_settings import ChatSettings
from gptmanager.server.http.access import AccessSettings
from gptmanager.terminal.options import ManagerOptions


def _manager() -> ManagerOptions:
    return ManagerOptions(ModelType.INFLIGHT_FUSED_BATCHING, SchedulerConfig(), OptionalParams())


@dataclass(frozen=True, kw_only=True)
class ServerSettings(AccessSettings, ChatSettings):
    """The options of `gptmanager serve` by name. Raises ConfigError for a wrong value.

    `served_model_name`: one or more; None: the name of the model's folder. `max_concurrency`:
    requests that run at once; None: as many as fit a batch. `max_queued_requests`,
    `max_queued_tokens`: limits of the waiting requests and their prompt tokens; None: no limit.
    `request_timeout`: seconds; None: no limit. `shutdown_timeout`: seconds. `adapters`: names and
    folders of adapters that are loaded at the start. `adapter_dir`: clients may load adapters from
    this folder; None: they cannot. `max_adapters`: of both kinds at once. `block_reuse` None: on,
    unless the batching is V1. `prompt_lookup`: draft tokens of a step; None: no drafts. `record`:
    the file of a recording. `triton`: serve /v2, which `grpc_port` implies. `lenient`: unknown
    fields cause a warning instead of an error. `log_format`: text or json. `log_prompts`: the log
    has prompts and outputs. `manager`: the manager's options."""

    model: Path
    served_model_name: str | Sequence[str] | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_concurrency: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    max_beam_width: int = 1
    request_timeout: float | None = None
    shutdown_timeout: float = 20.0
    adapters: Sequence[tuple[str, Path]] = ()
    adapter_dir: Path | None = None
    max_adapters: int = 128
    block_reuse: bool | None = None
    host_tier_bytes: int | None = None
    prompt_lookup: int | None = None
    record: Path | None = None
    log_format: str = "text"
    log_prompts: bool = False
    lenient: bool = False
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
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError(f"chat_template = {self.chat_template}: the file does not exist")
        self._check_names()

    def _check_names(self) -> None:
        names = [*self.names, *(name for name, _ in self.adapters)]
        for name in names:
            if not name.strip() or not name.isprintable():
                raise ConfigError(
                    f"served_model_name = {name!r} must be printable and must not be blank"
                )
            if names.count(name) > 1:
                raise ConfigError(f"served_model_name and adapters: {name!r} is there twice")
        if len(self.adapters) > self.max_adapters:
            raise ConfigError(
                f"max_adapters = {self.max_adapters} must be at least the number of adapters, "
                f"{len(self.adapters)}"
            )

    @property
    def serves_triton(self) -> bool:
        """Whether the server answers clients of Triton's protocol."""
        return self.triton or self.grpc_port is not None

    @property
    def name(self) -> str:
        """The model's first name for clients."""
        return self.names[0]

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model for clients."""
        given = self.served_model_name
        if given is None:
            return (self.model.resolve().name.removesuffix(".gguf"),)
        return (given,) if isinstance(given, str) else tuple(given)

    @property
    def concurrency(self) -> int:
        """The number of requests that may run at once."""
        if self.max_concurrency is not None:
            return self.max_concurrency
        params = self.manager.params
        return params.max_batch_size * (2 if params.enable_trt_overlap else 1)

    @property
    def params(self) -> OptionalParams:
        """The manager's parameters, with block reuse and the server's limits."""
        given, lookup, reuse = self.manager, self.prompt_lookup, self.block_reuse
        reuse = given.model_type is not ModelType.V1 if reuse is None else reuse
        cache = replace(given.params.kv_cache_config, enable_block_reuse=reuse)
        if self.host_tier_bytes is not None:
            cache = replace(cache, host_cache_size=self.host_tier_bytes)
        return replace(
            given.params,
            kv_cache_config=cache,
            max_active_requests=self.concurrency,
            exclude_input_in_output=True,
            speculative_decoding_config=None if lookup is None else PromptLookup(lookup),
            recording_path=self.record,
        )
