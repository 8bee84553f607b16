"""A server on this thread, and what happens to it, told from another one."""

import asyncio
import os
import signal
import threading

from running_server import settings_of
from starlette.routing import Route

from gptmanager.server import app
from gptmanager.server.engine.call import EngineRequest
from gptmanager.server.http.responses import DONE, EventStream, event
from gptmanager.server.serving import serve


class Outside:
    """What happens to a server that runs on this thread, told from another one.

    `num_tokens`: those of the request of each stream.
    """

    def __init__(self, act, num_tokens=400):
        self.act, self.num_tokens = act, num_tokens
        self.may_end = threading.Event()
        self.thread = None
        self.error = None

    def tell(self, line):
        """The server is ready."""
        self.url = line.partition("\n")[0].rpartition(" ")[2]
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        try:
            self.act(self)
        except BaseException as error:  # noqa: B036 - told by the test
            self.error = error
        finally:
            self.may_end.set()
            if self.error is not None and not self.engine.is_draining:
                os.kill(os.getpid(), signal.SIGTERM)

    def routes(self, engine, settings):
        self.engine = engine

        async def frames():
            request = EngineRequest([5, 6, 7], self.num_tokens, end_id=-1, is_streaming=True)
            async with engine.submit([request]) as call:
                async for _, part in call.parts():
                    yield event({"num": len(part.tokens)})
                    while not self.may_end.is_set():
                        await asyncio.sleep(0.005)
                    if part.result is not None:
                        yield event({"reason": part.result.finish_reasons[0].name})
            yield DONE

        return [Route("/test/stream", lambda request: EventStream(frames()))]

    def serve(self, monkeypatch, **fields):
        monkeypatch.setattr(app, "_FRONTS", (*app._FRONTS, self.routes))
        try:
            serve(settings_of(**fields), self.tell)
        finally:
            if self.thread is not None:
                self.thread.join(20)
            if self.error is not None:
                raise self.error
