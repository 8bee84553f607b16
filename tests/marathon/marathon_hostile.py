"""Attacks a server at random: does it answer all, stay responsive, and keep its size?

make marathon-hostile MINUTES=30 SEED=1

Clients send what no client should: OpenAI's API, Triton's over HTTP and gRPC. Meanwhile `/health`
is polled by another process, a canary asks the same again and again, and memory is measured.
Prints JSON, and exits with 1 if a bar is missed; the cases behind that are written to files, which
--replay sends once more.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
from adapter_folders import save_small_adapter
from child import Child
from hostile_bars import Bars, Record, judge
from hostile_calls import Target, send
from hostile_case import Case
from hostile_draws import Draws
from hostile_schema import made_up
from served_process import served_process
from server_watch import Watched

_WATCH = Path(__file__).with_name("server_watch.py")
_CANARY = {"prompt": "Tom had a red ball", "max_tokens": 12, "temperature": 0.8, "seed": 7}
_NUM_GRAMMARS = 256  # that a server keeps
_OPTIONS = (
    *("--triton", "--grpc-port", "0", "--kv-cache-tokens", "4096", "--tokens-per-block", "16"),
    *("--max-batch-size", "8", "--max-seq-len", "256", "--max-beam-width", "2"),
    *("--max-queued-requests", "256", "--read-timeout", "3", "--deterministic"),
)


class Canary:
    """Asks for one seeded text again and again; the first answer is the right one."""

    def __init__(self, target: Target, patience_s: float) -> None:
        self._url = f"http://{target.host}:{target.port}/v1/completions"
        self._client = httpx.Client(timeout=patience_s)
        self._expected = ""

    def __enter__(self) -> Canary:
        response = self._client.post(self._url, json=_CANARY)
        self._expected = response.json()["choices"][0]["text"]
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def ask(self) -> str:
        """ "equal", or what came instead."""
        try:
            response = self._client.post(self._url, json=_CANARY)
        except httpx.HTTPError as error:
            return repr(error)
        if response.status_code != 200:
            return str(response.status_code)
        text = response.json()["choices"][0]["text"]
        return "equal" if text == self._expected else f"{text!r}, not {self._expected!r}"


class Attack:
    """One run against a server that another process runs. `log`: gives what it has logged."""

    def __init__(
        self,
        target: Target,
        pid: int,
        cases: Iterator[Case],
        log: Callable[[], str],
        *,
        clients: int = 8,
        patience_s: float = 30.0,
        canary_s: float = 1.0,
        poll_s: float = 0.05,
        bars: Bars | None = None,
    ) -> None:
        self._target, self._pid, self._cases, self._log = target, pid, cases, log
        self._clients, self._patience_s, self._canary_s = clients, patience_s, canary_s
        self._poll_s, self._bars = poll_s, bars or Bars()
        self._record = Record()
        self._lock = threading.Lock()
        self._over = threading.Event()

    def run(self, seconds: float) -> dict[str, Any]:
        """The report of `judge`, sooner than after `seconds` if there are no more cases."""
        with self._watching() as watched, Canary(self._target, self._patience_s) as canary:
            give_up = time.monotonic() + seconds
            threads = [threading.Thread(target=self._attack) for _ in range(self._clients)]
            singing = threading.Thread(target=self._sing, args=[canary])
            for thread in (singing, *threads):
                thread.start()
            while any(thread.is_alive() for thread in threads) and time.monotonic() < give_up:
                threads[0].join(0.1) if threads[0].is_alive() else time.sleep(0.1)
                if not self._is_there():
                    self._record.failures.insert(0, "the server has ended")
                    break
            self._over.set()
            for thread in (singing, *threads):
                thread.join()
        return judge(self._record, watched[0], self._log(), self._bars)

    def failed(self) -> list[Case]:
        return list(self._record.failed.values())

    def _attack(self) -> None:
        while not self._over.is_set():
            with self._lock:
                case = next(self._cases, None)
            if case is None:
                return
            began = time.monotonic()
            outcome = send(case, self._target, self._patience_s)
            with self._lock:
                self._record.add(case, outcome, began, time.monotonic())

    def _sing(self, canary: Canary) -> None:
        while not self._over.is_set():
            told = canary.ask()
            with self._lock:
                self._record.canaries[told] += 1
                if told not in ("equal", "429"):
                    self._record.fail(f"the canary was answered with {told}")
            self._over.wait(self._canary_s)

    def _is_there(self) -> bool:
        try:
            state = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state != "Z"

    @contextlib.contextmanager
    def _watching(self) -> Iterator[list[Watched]]:
        """The list has what was watched, after the block."""
        where = (self._target.host, self._target.port, self._pid, self._poll_s)
        command = [sys.executable, "-S", str(_WATCH), *map(str, where)]
        found: list[Watched] = []
        with Child(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            yield found
            found.append(Watched.from_json(process.communicate()[0]))


def fields_of(document: dict[str, Any]) -> dict[str, Any]:
    """Path -> the properties of its body."""
    fields = {}
    for path, methods in document["paths"].items():
        body = methods.get("post", {}).get("requestBody")
        if body is not None:
            fields[path] = body["content"]["application/json"]["schema"].get("properties", {})
    return fields


def drawn(seed: int, document: dict[str, Any]) -> Iterator[Case]:
    """Without end: every fifth one is made up from the document, by a thread of its own."""
    draws = Draws(seed, fields_of(document))
    documented: queue.Queue[Case] = queue.Queue(50)
    threading.Thread(
        target=lambda: [documented.put(case) for case in made_up(seed, document)], daemon=True
    ).start()
    for number in itertools.count():
        yield draws.case(number)
        if number % 4 == 0:
            with contextlib.suppress(queue.Empty):  # it is slower than the clients
                yield documented.get_nowait()


def fill_caches(target: Target) -> None:
    """Have as many grammars compiled as the server keeps, and each of its child processes started:
    memory is judged when caches are full and all processes run, as neither is a leak.
    """
    url = f"http://{target.host}:{target.port}"

    def post(route: str, **body: Any) -> None:
        client.post(url + route, json={"max_tokens": 2, **body}).raise_for_status()

    def compile_grammar(number: int) -> None:
        schema = {"type": "object", "properties": {f"a{number}": {"type": "string"}}}
        post("/v1/completions", prompt="Tom", guided_json=schema)

    with httpx.Client(timeout=60) as client, ThreadPoolExecutor(4) as threads:
        for _ in threads.map(compile_grammar, range(_NUM_GRAMMARS)):
            pass
        messages = [{"role": "user", "content": "Tom"}]
        post("/v1/chat/completions", messages=messages)
        client.post(url + "/tokenize", json={"messages": messages}).raise_for_status()


@contextlib.contextmanager
def attacked(patience_s: float) -> Iterator[tuple[Target, int, Callable[[], str]]]:
    """A server with all fronts: where it is, its process, and what gives its log."""
    with tempfile.TemporaryDirectory() as folder:
        save_small_adapter(Path(folder, "small"))
        with served_process(*_OPTIONS, "--adapter-dir", folder) as server:
            url = httpx.URL(server.url)
            yield Target(url.host, url.port or 80, server.grpc), server.pid, server.log


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failed", type=Path, default=Path("build/hostile"), metavar="DIR")
    parser.add_argument("--replay", type=Path, nargs="+", default=[], metavar="FILE")
    options = parser.parse_args()
    with attacked(30.0) as (target, pid, log):
        document = httpx.get(f"http://{target.host}:{target.port}/openapi.json").json()
        cases = drawn(options.seed, document)
        if options.replay:
            cases = iter([Case.from_json(path.read_text()) for path in options.replay])
        fill_caches(target)
        attack = Attack(target, pid, cases, log, clients=1 if options.replay else 8)
        report = attack.run(60 * options.minutes)
        logged = log()
    report = {"seed": options.seed, "minutes": options.minutes, **report}
    options.failed.mkdir(parents=True, exist_ok=True)
    (options.failed / f"{options.seed}.log").write_text(logged)
    for case in attack.failed()[:100]:
        path = options.failed / f"{case.seed}-{case.number}.json"
        if not case.pieces:
            case = Draws(case.seed, fields_of(document)).case(case.number)
        path.write_text(case.as_json())
        report.setdefault("files", []).append(str(path))
    print(json.dumps(report))
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
