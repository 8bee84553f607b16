"""Options of `serve` from the environment and from a file: precedence, and each wrong value."""

import argparse
import os
import sys
from pathlib import Path

import pytest
from running_server import MODEL as FOLDER

from gptmanager import cli
from gptmanager.server import main as serve_main
from gptmanager.terminal.option_names import in_options, with_origin
from gptmanager.terminal.option_sources import MAX_FILE_BYTES, Repeated

MODEL = str(FOLDER)
PREFIX = "GPTMANAGER_SERVE_"


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """`parse(*arguments, config=TOML, PORT=...)`: the options of `gptmanager serve`."""
    for name in os.environ:
        if name.startswith(PREFIX):
            monkeypatch.delenv(name)

    def parse(*arguments, config=None, **variables):
        for name, value in variables.items():
            monkeypatch.setenv(PREFIX + name, value)
        if config is not None:
            file = tmp_path / "serve.toml"
            file.write_bytes(config if isinstance(config, bytes) else config.encode())
            arguments = ("--config", str(file), *arguments)
        return cli.command_parser().parse_args(["serve", *arguments])

    return parse


@pytest.fixture
def refused(parse, capsys):
    """The last line that a wrong call prints."""

    def refused(*arguments, **given):
        with pytest.raises(SystemExit) as caught:
            parse(*arguments, **given)
        assert caught.value.code == 2
        return capsys.readouterr().err.splitlines()[-1]

    return refused


def test_the_command_line_is_before_the_environment_and_that_before_the_file(parse):
    config = f'model = "{MODEL}"\nport = 1\nmax_adapters = 2\nhost = "file"\nlenient = true'
    options = parse("--port", "3", config=config, PORT="2", MAX_ADAPTERS="4", LENIENT="off")
    assert (options.port, options.max_adapters, options.host) == (3, 4, "file")
    assert options.model == (None, Path(MODEL)) and options.lenient is False
    assert options.origins["max_adapters"] == f"{PREFIX}MAX_ADAPTERS"
    assert options.origins["host"].startswith("host in /")


def test_every_option_can_be_in_both(parse, tmp_path):
    """An option of any type has the value that it would have on the command line."""
    serve = parse("--model", MODEL).parser
    texts = {
        "N": "3",
        "S": "2.5",
        "WHEN": "always",
        "DIR": str(tmp_path),
        "NAME=DIR": f"a={tmp_path}",
    }
    for action in serve._actions:
        option = action.option_strings[0].removeprefix("--")
        if option in ("help", "-h", "config", "model"):
            continue
        text = str(next(iter(action.choices))) if action.choices else texts.get(action.metavar, "x")
        is_switch = action.nargs == 0
        given = [f"--{option}"] if is_switch else [f"--{option}", text]
        expected = getattr(parse("--model", MODEL, *given), action.dest)
        variable = {option.upper().replace("-", "_"): "true" if is_switch else text}
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv(PREFIX + next(iter(variable)), next(iter(variable.values())))
            assert getattr(parse("--model", MODEL), action.dest) == expected, option
        value = "true" if is_switch else f"'{text}'"
        found = parse("--model", MODEL, config=f"{option} = {value}")
        assert getattr(found, action.dest) == expected, option


def test_lists(parse):
    config = 'served-model-name = ["a", "b c"]\nallowed-host = "one"\ncors-origin = ["*"]'
    options = parse("--model", MODEL, config=config)
    assert options.served_model_name == ["a", "b c"] and options.allowed_hosts == ["one"]
    options = parse(config=config, MODEL=MODEL, ALLOWED_HOST="two 'a b'", SERVED_MODEL_NAME="c d")
    assert options.allowed_hosts == ["two", "a b"] and options.served_model_name == ["c", "d"]
    options = parse("--allowed-host", "x", "--allowed-host", "y", MODEL=MODEL)
    assert options.allowed_hosts == ["x", "y"]  # not in addition to the others


def test_the_file_s_name_may_be_in_the_environment(parse, tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(f"model = '{MODEL}'\nbatching = 'v1'\nno-special-tokens-in-text = true")
    options = parse(CONFIG=str(file))
    assert options.batching == "v1" and options.no_special_tokens_in_text
    assert options.unknown_variables == []


def test_an_unknown_variable_is_a_warning(parse):
    options = parse("--model", MODEL, PROT="1", PORT="5", CONFIGS="x")
    assert options.unknown_variables == [f"{PREFIX}PROT", f"{PREFIX}CONFIGS"]


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ("prot = 1", "unknown option 'prot'; did you mean port?"),
        ("config = 'x'", "unknown option 'config'"),
        ("help = true", "unknown option 'help'"),
        ("[serve]\nport = 1", "unknown option 'serve'"),
        ("[port]\na = 1", "port in {}: must be a string or a number, not a table"),
        ("port = 'x'", "port in {}: must be an integer of at least 0, got 'x'"),
        ("port = true", "port in {}: must be a string or a number, not a boolean"),
        ("port = [1]", "port in {}: must be a string or a number, not an array"),
        ("port = 1979-05-27", "port in {}: must be a string or a number, not a date"),
        ("port = 1.0", "port in {}: must be an integer"),
        ("request-timeout = nan", "request-timeout in {}: must be a time"),
        ("request-timeout = inf", "request-timeout in {}: must be a time"),
        ("max-adapters = 0", "max-adapters in {}: must be a positive integer, got '0'"),
        ("max-adapters = 1\nmax_adapters = 1", "max-adapters is in the file twice"),
        ("port = 0x" + "f" * 20000, "port in {}"),
        ("port = " + "9" * 5000, "must be TOML"),
        ("lenient = 'yes'", "lenient in {}: must be true or false, not a str"),
        ("lenient = 1", "lenient in {}: must be true or false, not a number"),
        ("served-model-name = 3.10", "served-model-name in {}: must be a string, not a float"),
        ("served-model-name = []", "served-model-name in {}: must have at least one value"),
        ("allowed-host = [1]", "allowed-host in {}: must be a string, not a number"),
        ("allowed-host = [['a']]", "not an array"),
        ("api-key = 12345678", "api-key in {}: must be a string, not a number"),
        ("log-format = 'xml'", "log-format in {}: 'xml' must be one of text, json"),
        ("policy = 'x'", "policy in {}: 'x' must be one of "),
        ("model = 'nowhere'", "model in {}: must be a folder, a file"),
        ("model = 'a\\u0000b'", "model in {}"),
        ("adapter = 'x'", "adapter in {}: must be NAME=DIR, got 'x'"),
        ('"a\\u001b[2Jb" = 1', r"unknown option 'a\x1b[2Jb'"),
        ("port = 1\nport = 2", "must be TOML"),
        ("port = ", "must be TOML"),
        (b"\xff\xfe", "must be TOML"),
        ("a = " + "[" * 30000, "must be TOML"),
        ("a." * 900 + "a = 1", "unknown option 'a'"),
        ("a." * 5000 + "a = 1", "{}"),  # tomli, before Python 3.11, permits 1000 parts
        ("#" * (MAX_FILE_BYTES + 1), f"must have at most {MAX_FILE_BYTES} bytes"),
        ("#" * MAX_FILE_BYTES + "é", f"must have at most {MAX_FILE_BYTES} bytes"),
    ],
)
def test_a_wrong_file_is_one_sentence_that_names_the_key(refused, tmp_path, config, reason):
    told = refused("--model", MODEL, config=config)
    assert reason.format(tmp_path / "serve.toml") in told and "12345678" not in told
    assert told.startswith("gptmanager serve: error: ") and len(told) < 1000


@pytest.mark.parametrize("path", ["", "nowhere.toml", "a\0b", "/dev/zero", "/", "é" * 3000])
def test_an_unreadable_file_is_one_sentence(refused, path):
    told = refused("--model", MODEL, "--config", path)
    assert "error: --config" in told and len(told) < 4096


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("PORT", "", "must be an integer"),
        ("PORT", "tcp://10.0.0.1:80", "must be an integer"),
        ("LENIENT", "", "'' must be true or false"),
        ("LENIENT", "2", "'2' must be true or false"),
        ("LOG_FORMAT", "TEXT", "must be one of text, json"),
        ("ALLOWED_HOST", "'a", "No closing quotation"),
        ("SERVED_MODEL_NAME", " ", "must have at least one value"),
        ("MAX_BATCH_SIZE", "9" * 5000, "must be at most"),
        ("SEED", "x", "must be an integer, got 'x'"),
        ("HOST", "", "must have at least one character"),  # it would be every address
        ("JOURNAL", "", "must have at least one character"),  # the current folder
        ("DTYPE", "\udcff", "must be one of"),
    ],
)
def test_a_wrong_variable_is_named(refused, name, text, reason):
    told = refused("--model", MODEL, **{name: text})
    assert f"error: {PREFIX}{name}: " in told and reason in told


def test_a_missing_model_is_still_missing(refused):
    assert refused(config="port = 1").endswith("the following arguments are required: --model")
    assert refused("--config").endswith("argument --config: expected one argument")


def test_help_needs_no_valid_file(parse, capsys):
    with pytest.raises(SystemExit) as caught:
        parse("--help", config="nonsense", PORT="x")
    assert caught.value.code == 0
    told = capsys.readouterr().out
    for title in ("the model", "where the server listens", "access", "limits", "manager"):
        assert f"\n{title}:\n" in told


def test_an_error_after_parsing_names_the_origin_too(parse, capsys, tmp_path, monkeypatch):
    monkeypatch.setenv(f"{PREFIX}REQUEST_TIMEOUT", "0")
    assert cli.main(["serve", "--model", MODEL]) == 2
    assert f"({PREFIX}REQUEST_TIMEOUT)\n" in capsys.readouterr().err
    origins = {"port": "P", "max_body_bytes": "M", "model": "no", "api_key": "K"}
    for text, origin in [
        ("--host a --port 1 cannot be used", "P"),
        ("--grpc-port 1 and --port-range cannot be used", None),
        ("max_body_bytes = 0 must be more than 0", "M"),
        ("api_key must be printable", "K"),
        ("port and grpc_port are both 1", "P"),
        ("a port of the model", None),
        ("grpc_port = 7 must be", None),
        ("api_key_file = x", None),
    ]:
        told = with_origin(text, origins)
        assert told == (text if origin is None else f"{text} ({origin})")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("raise KvCacheConfig.max_tokens", "raise --kv-cache-tokens"),
        ("KvCacheConfig.dtype = 'fp8' is refused", "--kv-cache-dtype = 'fp8' is refused"),
        ("OptionalParams.dtype = 'x' with device = 'y'", "--dtype = 'x' with --device = 'y'"),
        ("one sequence of max_seq_len = 256: raise", "one sequence of --max-seq-len = 256: raise"),
        (
            "OptionalParams.enable_trt_overlap = True is refused with ModelType.V1: it runs",
            "--overlap is refused with --batching v1: it runs",
        ),
        ("KvCacheConfig.enable_block_reuse = False is", "--block-reuse = False is"),
        ("port and grpc_port are both 1", "--port and --grpc-port are both 1"),
        ("allowed_hosts: 'max_seq_len' must be", "--allowed-host: 'max_seq_len' must be"),
        ("/tmp/max_seq_len/port: no port = 1", "/tmp/max_seq_len/port: no port = 1"),
        ("the model has no seed, and max_tokens = 1", "the model has no seed, and max_tokens = 1"),
        ("the library needs device = 'cuda'", "the library needs --device = 'cuda'"),
        ("KvCacheConfig.use_uvm = 1 is refused", "KvCacheConfig.use_uvm = 1 is refused"),
        ("a/config.json: chat_template must be", "a/config.json: chat_template must be"),
        ("run_ahead = 1: enable_trt_overlap overlaps", "run_ahead = 1: --overlap overlaps"),
    ],
)
def test_an_error_names_options_in_place_of_parameters(parse, text, expected):
    actions = parse("--model", MODEL).parser.actions
    assert in_options(text, actions) == expected
    assert in_options(expected, actions) == expected


def test_a_repeated_option_replaces_its_default():
    parser = argparse.ArgumentParser()
    parser.add_argument("--a", action=Repeated, default=["default"])
    assert parser.parse_args([]).a == ["default"]
    assert parser.parse_args(["--a", "1", "--a", "2"]).a == ["1", "2"]


def test_the_log_warns_of_unknown_variables(parse, monkeypatch, caplog):
    class Serving:
        serve = staticmethod(lambda settings, tell: None)

    monkeypatch.setattr(serve_main, "load_extra", lambda *names: Serving)
    monkeypatch.setattr(serve_main, "leave_a_core", lambda: None)
    monkeypatch.setenv(f"{PREFIX}PROT", "secret")
    seen = []
    monkeypatch.setattr(serve_main._logger, "warning", lambda *words: seen.append(words))
    assert cli.main(["serve", "--model", MODEL]) == 0
    assert seen == [("the environment variable %s names no option of serve", f"{PREFIX}PROT")]


def test_a_python_without_toml_says_what_to_install(refused, monkeypatch):
    for name in ("tomllib", "tomli"):
        monkeypatch.setitem(sys.modules, name, None)
    assert "error: --config needs Python 3.11, or the package tomli" in refused(config="port = 1")
