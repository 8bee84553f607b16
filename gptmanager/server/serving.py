"""Runs a server: starts the manager and the event loop, handles signals, and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import gc
import json
import os
import shlex
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import uvicorn
import uvloop

from gptmanager import GptManager, ManagerState
from gptmanager.callbacks import AsyncRequestQueue, broadcast
from gptmanager.callbacks.longest_request import longest_request
from gptmanager.server.app import create_app
from gptmanager.server.engine.engine import Engine
from gptmanager.server.engine.metrics import ServerMetrics
from gptmanager.server.engine.model_card import ModelCard
from gptmanager.server.engine.throughput import log_throughput
from gptmanager.server.extras import load_extra
from gptmanager.server.http.connections import Connections, Proxies, default_max_connections
from gptmanager.server.http.http_protocol import HttpProtocol
from gptmanager.server.http.listening import address_of, bind, listening
from gptmanager.server.settings import ServerSettings

_GRPC = "gptmanager.server.triton.grpc_service"
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_POLL_S = 0.1  # interval of the checks that the manager is alive
_LAST_WRITES_S = 1  # limit on how long a client that does not read can delay the shutdown


def serve(settings: ServerSettings, tell: Callable[[str], None]) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. If there is a key file, SIGHUP reloads it instead.

    When the server is ready, `tell` is called with a welcome text. The first line of this text ends
    with the address. A second signal ends the server at once.

    Raises ConfigError for a model, an adapter or a port that cannot be used, ManagerDeadError if
    the manager fails (after all requests have been answered), KeyboardInterrupt after a second
    signal.
    """
    with listening(settings.host, settings.port, settings.uds) as listener:
        if settings.grpc_port is not None:
            bind(settings.host, settings.grpc_port, "--grpc-port").close()
            load_extra("triton", _GRPC)
        with open_engine(settings) as engine, _signals_restored(), _frozen():
            if uvloop.run(_serve(engine, settings, listener, tell)):
                raise KeyboardInterrupt
            engine.check_alive()


@contextlib.contextmanager
def open_engine(settings: ServerSettings) -> Iterator[Engine]:
    """Start a manager and yield its engine.

    Raises ConfigError if the settings or the model cannot be used.
    """
    given = settings.manager
    params = settings.params
    card = ModelCard.of_folder(
        settings.model,
        settings.names,
        max_seq_len=params.max_seq_len,
        max_beam_width=settings.max_beam_width,
        backend=params.model_backend,
    )
    queue = AsyncRequestQueue(
        max_pending=None,
        default_end_id=card.token_defaults.end_ids,
        default_pad_id=card.token_defaults.pad_id,
        exclude_input_in_output=True,
    )
    metrics = ServerMetrics(settings, queue)
    if params.journal_path is not None:
        params = dataclasses.replace(params, restore_cb=metrics.restored.restore)
    get: Any = metrics.get_inference_requests
    poll: Any = queue.poll_stop_signal
    if params.parallel_config is not None:
        get, poll = broadcast(get, poll)
    with (
        metrics,
        queue,
        GptManager(
            os.fspath(settings.model),
            given.model_type,
            settings.max_beam_width,
            given.scheduler,
            get,
            metrics.respond,
            poll,
            metrics.return_batch_manager_stats,
            params,
        ) as manager,
    ):
        queue.attach(manager)
        metrics.attach(manager)
        length = longest_request(manager, card.max_model_len)
        card = dataclasses.replace(card, max_model_len=length)
        peft = params.peft_cache_manager_config
        has_adapters = peft.host_cache_size != 0 and peft.device_cache_percent != 0.0
        yield Engine(card, manager, queue, settings, metrics, has_adapters=has_adapters)


@contextlib.contextmanager
def _frozen() -> Iterator[None]:
    """Exempt the objects of a started server from garbage collection.

    Modules, the model and compiled kernels live as long as the process, and a full collection would
    stop every thread for 0.25 s. If the host has already frozen its objects, nothing changes.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def _signals_restored() -> Iterator[None]:
    """Restore the earlier signal handlers at the end, which the event loop does not do."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


async def _serve(
    engine: Engine, settings: ServerSettings, listener: socket.socket, tell: Callable[[str], None]
) -> bool:
    """Serve until the server ends, and return whether a second signal has ended it at once.

    After the first signal, running requests may finish.
    """
    server = new_server(engine, settings)
    await engine.load_given_adapters()  # a signal still ends the process at once
    loop = asyncio.get_running_loop()
    ending: list[asyncio.Task[None]] = []

    def end() -> None:
        if ending:
            server.should_exit = server.force_exit = True
        else:
            ending.append(loop.create_task(_end(server, engine, settings.shutdown_timeout)))

    loop.add_signal_handler(signal.SIGINT, end)
    loop.add_signal_handler(signal.SIGTERM, end)
    if settings.api_key_file is not None:
        loop.add_signal_handler(signal.SIGHUP, engine.keys.reload)
        engine.keys.reload()  # the file may have changed before the handler was set
    elif signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup ignores it
        loop.add_signal_handler(signal.SIGHUP, end)
    async with _grpc(engine, settings, server) as grpc_port:
        address = address_of(listener, "http" if settings.tls_cert is None else "https")
        lines = welcome(engine, settings, address, grpc_port)
        server.on_start = lambda: tell(lines)
        watching = loop.create_task(_end_with_manager(server, engine))
        telling = loop.create_task(log_throughput(engine))
        await server.serve(sockets=[listener])
        watching.cancel()
        telling.cancel()
    return server.force_exit


@contextlib.asynccontextmanager
async def _grpc(
    engine: Engine, settings: ServerSettings, server: Server
) -> AsyncIterator[int | None]:
    """Serve Triton's protocol over gRPC. Yield the port, or None if `--grpc-port` is not set."""
    if settings.grpc_port is None:
        yield None
        return
    front = await load_extra("triton", _GRPC).GrpcFront.start(engine, settings)
    try:
        yield front.port
    finally:
        await front.stop(0 if server.force_exit else _LAST_WRITES_S)


async def _end(server: Server, engine: Engine, timeout_s: float) -> None:
    await engine.drain(timeout_s)
    server.should_exit = True


async def _end_with_manager(server: Server, engine: Engine) -> None:
    """End the server when its manager has failed, so that a supervisor can start a new server."""
    while engine.manager.state is not ManagerState.FAILED:
        await asyncio.sleep(_POLL_S)
    await _end(server, engine, _LAST_WRITES_S)


def welcome(
    engine: Engine, settings: ServerSettings, address: str, grpc_port: int | None = None
) -> str:
    """Return the text that a started server prints: its addresses and an example of a request."""
    has_key, name = settings.has_key, engine.card.name
    is_text = engine.card.tokenizer is not None
    body = {"model": name, "prompt": "17 + 25 =" if is_text else [1, 2, 3], "max_tokens": 16}
    key = "-H 'Authorization: Bearer KEY' " if has_key else ""
    uds = "" if settings.uds is None else f"--unix-socket {shlex.quote(str(settings.uds))} "
    kind = "-H 'Content-Type: application/json'"
    grpc = [] if grpc_port is None else [f"  gRPC       {settings.host}:{grpc_port}, as Triton"]
    return "\n".join(
        [
            f"{name} is served at {settings.uds or address}",
            *grpc,
            *([] if uds else [f"  live page  {address}/{'?key=KEY' if has_key else ''}"]),
            f"  try        curl {uds}{address}/v1/completions {key}{kind} "
            f"-d {shlex.quote(json.dumps(body, ensure_ascii=False))}",
            "  end        Ctrl-C lets running requests finish; a second Ctrl-C stops them",
        ]
    )


class Server(uvicorn.Server):
    """uvicorn's server without its signal handlers, and with `on_start`.

    The signal handlers would end the server too early: after a signal, the server must answer until
    its requests have finished. `on_start` is called when the server listens.
    """

    on_start: Callable[[], None] = staticmethod(lambda: None)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_start()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def http_protocol(settings: ServerSettings, count: Callable[[int, str], None]) -> Any:
    """Return a factory of connections that share the server's limits. `count` is called with the
    status and the code of each refused connection.
    """
    limits = Connections(
        settings.max_connections or default_max_connections(),
        settings.max_connections_per_address,
        Proxies(settings.forwarded_allow_ips),
        count,
    )
    return functools.partial(HttpProtocol, limits=limits, read_timeout_s=settings.read_timeout)


def new_server(engine: Engine, settings: ServerSettings) -> Server:
    """Return a server. `await server.serve(sockets=[...])` runs it until `server.should_exit`."""
    config = uvicorn.Config(
        create_app(engine, settings),
        loop="none",
        http=http_protocol(settings, engine.metrics.request_log.count),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        forwarded_allow_ips=list(settings.forwarded_allow_ips),
        timeout_keep_alive=settings.keep_alive_timeout,  # type: ignore[arg-type] # a float works
        timeout_graceful_shutdown=_LAST_WRITES_S,
    )
    config.load()
    config.ssl = settings.tls_context()
    return Server(config)
