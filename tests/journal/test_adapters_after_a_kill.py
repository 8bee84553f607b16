"""A process is killed while requests with adapters run: what do their task ids mean in the next?"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from child import Child
from journaled_runs import Output


class Life:
    """A process of `adapter_life.py`. `outputs` has what the host got, in this life and before."""

    def __init__(self, folder: Path, outputs: Mapping[int, Output]) -> None:
        self.outputs: dict[int, Output] = defaultdict(Output, outputs)
        script = Path(__file__).parents[1] / "support" / "adapter_life.py"
        self.process = Child(
            [sys.executable, script, folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tell({n: (len(it.tokens), it.num_finals > 0) for n, it in outputs.items()})

    def _tell(self, line: Any) -> None:
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()

    def ask(self, number: int, task: int, *, weights: int | None = None, length: int = 60) -> None:
        """Have Get return a request. Those whose numbers have the same last digit are alike."""
        prompt = [number % 10, 40, 41]
        own = {"id": number, "prompt": prompt, "task": task, "weights": weights}
        self._tell(own | {"length": length})

    def forget(self, task: int) -> None:
        self._tell({"forget": task})

    def _read(self) -> bool:
        text = self.process.stdout.readline()
        if text.endswith("\n"):
            line = json.loads(text)
            output = self.outputs[line["id"]]
            assert not output.num_finals
            output.tokens += line["ids"]
            output.num_finals += line["final"]
            output.errors += [line["error"]] if line["error"] else []
        return bool(text)

    def run_until(self, is_enough: Callable[[Mapping[int, Output]], Any]) -> None:
        """Let it send one response after the other."""
        while not is_enough(self.outputs):
            self._tell({"allow": 1})
            assert self._read(), "the process has ended"

    def kill(self) -> dict[int, Output]:
        """Kill it with SIGKILL, while it wants to send a response; return what the host has."""
        self.process.kill()
        while self._read():
            pass
        self.process.wait()
        return self.outputs

    def end(self) -> dict[int, Output]:
        """Wait until all requests have ended."""
        self._tell({"allow": 10_000})
        self.process.stdin.close()
        while self._read():
            pass
        assert self.process.wait() == 0
        return self.outputs


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Any]:
    """Starts lives on one journal."""
    with contextlib.ExitStack() as lives:

        def start(had: Mapping[int, Output] | None = None) -> Life:
            life = Life(tmp_path / "journal", had or {})
            lives.enter_context(life.process)
            lives.callback(life.process.kill)
            return life

        yield start


@pytest.mark.timeout(300)
def test_a_task_id_alone_names_the_adapter_of_requests_that_continue_and_no_other(live):
    first = live()
    first.ask(5, 4, weights=2, length=8)
    first.run_until(lambda outputs: outputs[5].num_finals)
    first.ask(1, 3, weights=1, length=8)
    first.ask(2, 3)
    first.ask(3, 3)
    first.run_until(lambda outputs: outputs[1].num_finals)
    had = first.kill()
    assert {number for number, it in had.items() if it.num_finals} == {1, 5}

    second = live(had)
    second.ask(4, 3)
    second.ask(6, 4)
    second.run_until(lambda outputs: outputs[4].num_finals and outputs[6].num_finals)
    assert second.outputs.pop(6).errors == [
        "AdapterError: lora_task_id 4 is not cached: pass lora_weights and lora_config with it"
    ]
    second.ask(15, 4, weights=2, length=8)
    second.ask(11, 3, weights=1, length=8)
    for number in (12, 13, 14):
        second.ask(number, 3)
    outputs = second.end()
    assert [error for it in outputs.values() for error in it.errors] == []
    for number in range(1, 6):  # the same requests again, which nothing has interrupted
        assert outputs[number].tokens == outputs[number + 10].tokens, number
        assert outputs[number].num_finals == 1


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_requests_with_a_forgotten_adapter_and_with_its_successor_continue(live):
    first = live()
    first.ask(1, 3, weights=1)
    first.run_until(lambda outputs: outputs[1].tokens)
    first.forget(3)
    first.ask(2, 3, weights=2)
    first.ask(3, 3)
    first.run_until(lambda outputs: len(outputs[1].tokens) == 30)
    had = first.kill()
    assert {number for number, it in had.items() if it.num_finals} == set()

    second = live(had)
    second.ask(4, 3)
    second.ask(11, 5, weights=1)
    second.ask(12, 6, weights=2)
    second.ask(13, 6)
    second.ask(14, 6)
    outputs = second.end()
    assert [error for it in outputs.values() for error in it.errors] == []
    for number in range(1, 5):
        assert outputs[number].tokens == outputs[number + 10].tokens, number
        assert outputs[number].num_finals == 1
    assert outputs[1].tokens != outputs[2].tokens
