"""Servers for tests, on real sockets: each in a thread with an event loop of its own."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
import types
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

import uvicorn.server

from gptmanager import KvCacheConfig, ModelType, OptionalParams, SchedulerConfig
from gptmanager.server.engine.engine import Engine
from gptmanager.server.http.listening import address_of, listening
from gptmanager.server.serving import Server, new_server, open_engine
from gptmanager.server.settings import ServerSettings
from gptmanager.terminal.options import ManagerOptions

MODEL = Path(__file__).resolve().parents[2] / "examples" / "tiny_llama"
_T = TypeVar("_T")

# uvicorn looks for its end each 0.1 s, and then waits 0.1 s: longer than many a server is used here
uvicorn.server.asyncio = types.SimpleNamespace(  # type: ignore[attr-defined]
    **{**vars(asyncio), "sleep": lambda seconds: asyncio.sleep(seconds / 10)}
)


@dataclass
class RunningServer:
    """`url`: without a slash at its end. `run` runs a coroutine on the server's event loop."""

    url: str
    engine: Engine
    settings: ServerSettings
    server: Server
    loop: asyncio.AbstractEventLoop

    def run(self, coroutine: Coroutine[Any, Any, _T]) -> _T:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def wait_idle(self) -> None:
        """Nothing runs and nothing waits."""
        wait_for(lambda: self.engine.counts == (0, 0))

    @contextlib.contextmanager
    def held(
        self, is_over: Callable[[], Any] | None = None, after: int = 8, num_requests: int = 1
    ) -> Iterator[None]:
        """In the `with` block, let the loop wait in a step, after `after` others, until `is_over`.

        By default, this is when a request must stop. So no long request ends before the test has
        done what is to happen meanwhile, however busy the machine is. The first step waits until
        the server has `num_requests`, so that the others compute for all of them.
        """
        wanted = is_over or self.engine.queue.poll_stop_signal
        loop, steps = self.engine.manager._worker.loop, itertools.count()
        assert loop is not None
        forward = loop.forward

        def hold(schedule: Any) -> Any:
            number = next(steps)
            if number == 0:
                wait_for(lambda: sum(self.engine.counts) >= num_requests)
            elif number >= after:
                wait_for(lambda: has_left or wanted())
            return forward(schedule)

        has_left: list[bool] = []  # a step may begin when the block is already over
        with mock.patch.object(loop, "forward", hold):
            try:
                yield
            finally:
                has_left.append(True)

    def settle(self) -> None:
        """Wait for what follows the answers: ends of calls, statistics, lines of the log."""
        self.wait_idle()
        wait_for(lambda: all(map(_stays, asyncio.all_tasks(self.loop))))
        assert self.engine.manager.wait_idle(20)


def _stays(task: asyncio.Task[Any]) -> bool:
    """Whether it is a task of a server over HTTP or gRPC, and not of a call."""
    name = getattr(task.get_coro(), "__qualname__", "")
    return name == "Server.serve" or name.startswith("AioServer.")


def wait_for(condition: Callable[[], Any], timeout_s: float = 50.0) -> None:
    give_up = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < give_up, "it never came"
        time.sleep(0.005)


def settings_of(model: Path = MODEL, params: dict[str, Any] | None = None, **fields: Any) -> Any:
    """Those of a small server with Triton's protocol; `params`: fields of OptionalParams.

    Answers from different batches are compared, also where torch computes the products.
    """
    cache = KvCacheConfig(max_tokens=16384)
    given = OptionalParams(kv_cache_config=cache, max_batch_size=32, deterministic=True)
    for name, value in (params or {}).items():
        setattr(given, name, value)
    manager = ManagerOptions(ModelType.INFLIGHT_FUSED_BATCHING, SchedulerConfig(), given)
    fields = {"port": 0, "max_beam_width": 4, "triton": True, **fields}
    return ServerSettings(model=model, manager=manager, **fields)


@contextlib.contextmanager
def running_server(settings: ServerSettings) -> Iterator[RunningServer]:
    """A server that has started; it ends with the block, its requests are cut off."""
    with contextlib.ExitStack() as stack:
        where = settings.host, settings.port, settings.uds
        listener = stack.enter_context(listening(*where))
        engine = stack.enter_context(open_engine(settings))
        loop = asyncio.new_event_loop()
        server = new_server(engine, settings)
        # a daemon, because Python would wait for the end of a thread that loops for ever
        thread = threading.Thread(
            target=lambda: loop.run_until_complete(server.serve(sockets=[listener])), daemon=True
        )
        thread.start()
        scheme = "https" if settings.tls_cert else "http"
        try:
            wait_for(lambda: server.started or not thread.is_alive())
            yield RunningServer(address_of(listener, scheme), engine, settings, server, loop)
        finally:
            server.should_exit = server.force_exit = True
            thread.join(30)
            assert not thread.is_alive(), "the server's thread does not end"
            loop.close()
