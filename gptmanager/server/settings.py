"""`ServerSettings`: the checked options of `gptmanager serve`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from gptmanager.config import ModelType, OptionalParams, SchedulerConfig
from gptmanager.errors import ConfigError
from gptmanager.server.chat_settings import ChatSettings
from gptmanager.server.http.access import AccessSettings
from gptmanager.terminal.options import ManagerOptions


def _manager() -> ManagerOptions:
    return ManagerOptions(ModelType.INFLIGHT_FUSED_BATCHING, SchedulerConfig(), OptionalParams())


@dataclass(frozen=True, kw_only=True)
class ServerSettings(AccessSettings, ChatSettings):
    """The options of `gptmanager serve` by name. Raises ConfigError for a wrong value.

    `served_model_name`: None: the name of the model's folder. `max_concurrency`: requests that run
    at once; None: as many as fit a batch. `max_queued_requests`, `max_queued_tokens`: limits of the
    waiting requests and their prompt tokens; None: no limit. `request_timeout`: seconds; None: no
    limit. `shutdown_timeout`: seconds. `adapter_dir`: clients may load adapters from this folder,
    `max_adapters` at once; None: they cannot. `triton`: serve /v2, which `grpc_port` implies.
    `lenient`: unknown fields cause a warning instead of an error. `log_format`: text or json.
    `log_prompts`: the log has prompts and outputs. `manager`: the manager's options.
    """

    model: Path
    served_model_name: str | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    max_concurrency: int | None = None
    max_queued_requests: int = 1024
    max_queued_tokens: int | None = None
    max_beam_width: int = 1
    request_timeout: float | None = None
    shutdown_timeout: float = 20.0
    adapter_dir: Path | None = None
    max_adapters: int = 128
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
        if self.port and self.port == self.grpc_port:
            raise ConfigError(f"port and grpc_port are both {self.port}: they must differ")
        if self.chat_template is not None and not self.chat_template.is_file():
            raise ConfigError(f"chat_template = {self.chat_template}: the file does not exist")
        if not self.name.strip() or not self.name.isprintable():
            raise ConfigError(
                f"served_model_name = {self.name!r} must be printable and must not be blank"
            )

    @property
    def serves_triton(self) -> bool:
        """Whether the server answers clients of Triton's protocol."""
        return self.triton or self.grpc_port is not None

    @property
    def name(self) -> str:
        """The model's name for clients."""
        if self.served_model_name is None:
            return self.model.resolve().name.removesuffix(".gguf")
        return self.served_model_name

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
        given = self.manager
        reuses = given.model_type is not ModelType.V1  # V1 does not support block reuse
        cache = replace(given.params.kv_cache_config, enable_block_reuse=reuses)
        return replace(
            given.params,
            kv_cache_config=cache,
            max_active_requests=self.concurrency,
            exclude_input_in_output=True,
        )
