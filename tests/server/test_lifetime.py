"""A server from its start to its end: what cannot start, signals, and what still runs then."""

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
import torch
from child import Child
from outside_server import Outside
from running_server import MODEL, settings_of, wait_for

from gptmanager import ManagerState, cli
from gptmanager.environment.distribution import install_command
from gptmanager.errors import ConfigError, ManagerDeadError, SchedulerError
from gptmanager.server import main, serving
from gptmanager.server.engine.engine import Engine
from gptmanager.server.extras import load_extra
from gptmanager.server.http.listening import address_of, bind
from gptmanager.server.serving import welcome
from gptmanager.server.settings import ServerSettings


def status(url):
    return httpx.get(url).status_code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_lets_requests_end_and_takes_no_new_ones(monkeypatch, number):
    seen = []

    def act(outside):
        with httpx.stream("GET", outside.url + "/test/stream", timeout=20) as response:
            lines = response.iter_lines()
            seen.append(next(lines))
            assert status(outside.url + "/health/ready") == 200
            os.kill(os.getpid(), number)
            wait_for(lambda: outside.engine.is_draining)
            assert status(outside.url + "/health/ready") == 503
            assert status(outside.url + "/health/live") == 200
            refused = httpx.get(outside.url + "/health/ready")
            assert refused.headers["retry-after"] == "1"
            other = httpx.get(outside.url + "/test/stream")
            assert b"is shutting down" in other.content
            outside.may_end.set()
            seen.extend(lines)

    Outside(act, num_tokens=40).serve(monkeypatch)
    assert seen[-4:] == ['data: {"reason":"LENGTH"}', "", "data: [DONE]", ""]


def test_what_runs_too_long_gets_its_last_events(monkeypatch):
    seen = []

    def act(outside):
        with httpx.stream("GET", outside.url + "/test/stream", timeout=20) as response:
            lines = response.iter_lines()
            seen.append(next(lines))
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: outside.engine.is_draining)
            outside.may_end.set()
            seen.extend(lines)

    # the request may be done by itself before the signal; what counts is that the end does not wait
    Outside(act).serve(monkeypatch, shutdown_timeout=0.0)
    assert seen[-2:] == ["data: [DONE]", ""]


def test_a_second_signal_ends_at_once(monkeypatch, caplog):
    def act(outside):
        with httpx.stream("GET", outside.url + "/test/stream", timeout=20) as response:
            lines = response.iter_lines()
            next(lines)
            os.kill(os.getpid(), signal.SIGINT)
            wait_for(lambda: outside.engine.is_draining)
            os.kill(os.getpid(), signal.SIGINT)
            with pytest.raises(httpx.HTTPError):
                list(lines)

    with pytest.raises(KeyboardInterrupt):
        Outside(act).serve(monkeypatch, shutdown_timeout=3000.0)
    assert not [it for it in caplog.records if it.exc_info]  # a cancelled stream logs none


@pytest.mark.slow
def test_any_number_of_signals_shows_no_traceback():
    with Child(SERVE, stderr=subprocess.PIPE, text=True) as process:
        process.stderr.readline()
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            time.sleep(0.01)
        assert "Traceback" not in process.stderr.read()
    assert process.returncode == -signal.SIGINT


def test_a_hangup_reloads_the_key_where_it_has_a_file(monkeypatch, tmp_path):
    file = tmp_path / "key"
    file.write_text("one")

    def act(outside):
        def status_with(key):
            headers = {"Authorization": f"Bearer {key}"}
            return httpx.get(outside.url + "/v1/models", headers=headers).status_code

        assert (status_with("one"), status_with("two")) == (200, 401)
        file.write_text("two")
        os.kill(os.getpid(), signal.SIGHUP)
        wait_for(lambda: status_with("two") == 200)
        assert status_with("one") == 401
        os.kill(os.getpid(), signal.SIGTERM)

    async def load(engine):
        handlers.append(signal.getsignal(signal.SIGTERM))

    handlers = [signal.getsignal(signal.SIGTERM)]
    monkeypatch.setattr(Engine, "load_given_adapters", load)
    Outside(act).serve(monkeypatch, api_key_file=file)
    assert handlers[0] is handlers[1], "while it loads adapters, a signal ends it at once"


SERVE = [
    sys.executable,
    "-m",
    "gptmanager",
    "serve",
    "--model",
    MODEL,
    "--port",
    "0",
    "--threads",
    "1",
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("number", "status", "text"),
    [
        (signal.SIGTERM, 0, "gptmanager: terminated\n"),
        (signal.SIGHUP, 0, "gptmanager: terminated\n"),
        (signal.SIGINT, -signal.SIGINT, "gptmanager: interrupted\n"),
    ],
)
def test_a_signal_before_the_server_serves_ends_it_with_a_line(tmp_path, number, status, text):
    """It is sent while the server reads a part of its model."""
    config = tmp_path / "config.json"
    config.symlink_to(MODEL / "config.json")
    os.mkfifo(tmp_path / "tokenizer_config.json")
    command = [tmp_path if it == MODEL else it for it in SERVE]
    with Child(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for(lambda: b"serve" in Path(f"/proc/{process.pid}/cmdline").read_bytes())
        wait_for(lambda: catches(process.pid, signal.SIGTERM))  # SIGINT is caught by Python itself
        process.send_signal(number)
        assert process.stderr.read() == text
    assert process.returncode == status


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_are_handled_before_the_command_line_is_imported(number):
    code = f"""
import os, sys

class Interrupting:
    def find_spec(name, path, target=None):
        if name == "gptmanager.cli":
            heavy = {{"argparse", "logging", "importlib.metadata", "torch"}}
            print(sorted(heavy & sys.modules.keys()), flush=True)
            os.kill(os.getpid(), {int(number)})

from gptmanager.__main__ import main
sys.meta_path.insert(0, Interrupting)
sys.argv[1:] = ["serve"]
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "gptmanager: terminated\n")


def catches(pid, number):
    found = re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1], 16) >> (number - 1) & 1


def told(capsys, *arguments):
    code = cli.main(["serve", "--model", str(MODEL), "--threads", "1", *arguments])
    return code, capsys.readouterr().err


def test_an_occupied_port_is_one_sentence(capsys):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        code, error = told(capsys, "--port", port)
    assert code == 2
    assert (
        error
        == f"gptmanager: --host 127.0.0.1 --port {port} cannot be used: Address already in use\n"
    )


def test_a_missing_model_is_one_sentence(capsys, tmp_path):
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", "--model", "nowhere"])
    assert caught.value.code == 2
    assert capsys.readouterr().err.endswith(
        "argument --model: must be a folder, a file, or a name that `gptmanager models` lists, "
        "got 'nowhere'\n"
    )
    code = cli.main(["serve", "--model", str(tmp_path), "--port", "0"])
    assert code == 2 and capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("package", ["uvicorn", "starlette"])
def test_a_missing_extra_is_one_sentence(capsys, monkeypatch, package):
    for name in [it for it in sys.modules if it.startswith(("gptmanager.server.", package))]:
        if name not in ("gptmanager.server.main", "gptmanager.server.settings"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, error = told(capsys)
    assert code == 2 and error.count("\n") == 1
    assert install_command("server") in error and package in error
    with pytest.raises(ModuleNotFoundError):  # not a package of the extra
        load_extra("server", "nowhere")


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_welcome_has_the_format_of_the_log(capsys, monkeypatch, log_format):
    welcomed = "it is served at x\n  end  Ctrl-C"
    monkeypatch.setattr(serving, "serve", lambda settings, tell: tell(welcomed))
    code, error = told(capsys, "--log-format", log_format)
    message = json.loads(error)["message"] if log_format == "json" else error
    assert code == 0 and message.removeprefix("gptmanager: ").rstrip("\n") == welcomed


def test_a_rank_that_follows_ends_well(monkeypatch):
    followed = []
    monkeypatch.setattr(main, "is_follower", lambda params: True)
    monkeypatch.setattr(main, "follow", lambda *given: followed.append(given))
    monkeypatch.setattr("signal.signal", lambda *given: None)
    words = ["serve", "--model", str(MODEL), "--threads", "1"]
    assert main.main(cli.command_parser().parse_args(words)) == 0 and len(followed) == 1


def test_settings_are_checked_by_name():
    for field, value in [
        ("port", 70000), ("grpc_port", -1), ("max_concurrency", 0), ("max_queued_requests", -1),
        ("request_timeout", 0), ("api_key", ""), ("api_key", "a\nb"), ("api_key", "a "),
        ("api_key", "\udcff"), ("served_model_name", " "), ("max_body_bytes", 0),
        ("max_body_bytes", (1 << 30) + 1),
    ]:  # fmt: skip
        with pytest.raises(ConfigError, match=field):
            ServerSettings(model=MODEL, **{field: value})
    lowest = {"max_queued_requests": 0, "max_queued_tokens": 0, "shutdown_timeout": 0}
    lowest |= {"max_concurrency": 1, "max_beam_width": 1, "max_adapters": 1, "max_body_bytes": 1}
    lowest |= {"max_connections": 1, "max_connections_per_address": 1}
    ServerSettings(model=MODEL, **lowest)
    for field, value in lowest.items():
        with pytest.raises(ConfigError, match=f"{field} = {value - 1}"):
            ServerSettings(model=MODEL, **{field: value - 1})


@pytest.mark.parametrize(
    ("words", "num_tokens", "chunked"),
    [
        ("", 2560, True),
        ("--device cpu --tokens-per-block 4096", 4096, True),
        ("--max-num-tokens 8192", 8192, None),
        ("--max-num-tokens 100 --chunked-context", 100, True),
        ("--device emulator", 8192, None),
        ("--batching v1", 8192, None),
        ("--policy static_batch --chunked-context", 8192, True),
    ],
)
def test_a_server_on_a_cpu_has_short_steps(words, num_tokens, chunked):
    parsed = cli.command_parser().parse_args(["serve", "--model", str(MODEL), *words.split()])
    params = main.server_settings(parsed).params
    assert (params.max_num_tokens, params.enable_chunked_context) == (num_tokens, chunked)


@pytest.mark.parametrize(
    ("cores", "threads", "told", "left"),
    [
        *[(1, 1, None, 1), (2, 2, None, 1), (4, 4, None, 3), (5, 5, None, 5)],
        *[(4, 2, None, 2), (2, 8, None, 1), (2, 2, "2", 2)],
    ],
)
def test_of_few_cores_one_is_left_to_others(monkeypatch, cores, threads, told, left):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if told is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", told)
    monkeypatch.setattr(main, "num_cores", lambda: cores)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert main.leave_a_core() == (cores if left < min(cores, threads) else 0)
        assert torch.get_num_threads() == left
    finally:
        torch.set_num_threads(before)


def test_the_command_serves_and_ends_with_0():
    with Child(SERVE, stderr=subprocess.PIPE, text=True) as process:
        line = next(line for line in process.stderr if "http://" in line)  # kernels come before
        url = line.strip().rpartition(" ")[2]
        assert status(url + "/health") == 200
        shown = [process.stderr.readline() for _ in range(3)]
        assert f" {url}/\n" in shown[0]  # the live page
        call = shlex.split(shown[1].partition("curl ")[2])
        body = call[call.index("-d") + 1]
        json_type = {"Content-Type": "application/json"}
        answer = httpx.post(call[0], content=body, headers=json_type)
        assert answer.status_code == 200 and answer.json()["choices"][0]["text"]
        process.send_signal(signal.SIGTERM)
        logged = process.stderr.read().splitlines()  # a line about throughput, too, if it was slow
        (line,) = [line for line in logged if " route=" in line]
        assert " route=/v1/completions status=200 " in line
    assert process.returncode == 0


def test_a_server_whose_manager_fails_answers_its_clients_and_ends(monkeypatch):
    seen = []

    def act(outside):
        loop, numbers = outside.engine.manager._worker.loop, itertools.count()
        schedule = loop.schedule

        def fails():
            if loop.active and next(numbers) > 4:
                raise SchedulerError("it is mad")
            return schedule()

        monkeypatch.setattr(loop, "schedule", fails)
        with httpx.stream("GET", outside.url + "/test/stream", timeout=20) as response:
            lines = response.iter_lines()
            seen.append(next(lines))
            wait_for(lambda: outside.engine.manager.state is ManagerState.FAILED)
            for path in ("/health", "/health/live"):  # the latter when the loop's thread has ended
                wait_for(lambda path=path: status(outside.url + path) == 503)
            refused = httpx.get(outside.url + "/test/stream")
            assert b"SchedulerError: it is mad" in refused.content
            outside.may_end.set()
            seen.extend(lines)

    monkeypatch.setattr(serving, "_LAST_WRITES_S", 20)  # the stream ends it earlier
    with pytest.raises(ManagerDeadError, match="SchedulerError: it is mad"):
        Outside(act).serve(monkeypatch)
    error = json.loads(seen[-4].removeprefix("data: "))["error"]
    assert error["type"] == "internal_server_error" and "it is mad" in error["message"]
    assert seen[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_the_welcome_says_how_to_call_the_server_without_its_key(engine, host):
    settings = settings_of(api_key="secret", host=host)
    with contextlib.closing(bind(host, 0)) as listener:
        address = address_of(listener)
        told = welcome(engine, settings, address)
    assert httpx.URL(address).host == host
    assert "?key=KEY" in told and "Bearer KEY" in told and "secret" not in told
