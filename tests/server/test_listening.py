"""Where a server listens: a Unix socket, HTTPS, a proxy's prefix; pages of other origins."""

import os
import shutil
import ssl
import subprocess
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from adapter_folders import save_output_adapter
from running_server import MODEL, running_server, settings_of

from gptmanager.cli import command_parser
from gptmanager.errors import ConfigError
from gptmanager.server.http.listening import bind, bind_path, listening
from gptmanager.server.main import server_settings
from gptmanager.server.serving import welcome

PAGE = "https://page.example"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")


def new_certificate(folder, *options):
    """A certificate for localhost that signs itself, and its key."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    made = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-days", "2"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    options = options or ("-nodes",)
    command = ["openssl", "req", "-x509", *made, *names, *options, "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}


@pytest.fixture(scope="module")
def secured(tmp_path_factory):
    """With all of it, and a key."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    folder = tmp_path_factory.mktemp("tls")
    adapter = save_output_adapter(folder / "adapter")
    settings = settings_of(
        uds=folder / "socket",
        cors_origins=[PAGE],
        root_path="/llm",
        api_key="secret",
        served_model_name=["first", "second"],
        adapters=[("mine", adapter)],
        triton=False,
        **new_certificate(folder),
    )
    with running_server(settings) as server:
        server.run(server.engine.load_given_adapters())
        yield server
    assert not settings.uds.exists()


@pytest.fixture
def ask(secured):
    settings = secured.settings
    trusted = ssl.create_default_context(cafile=str(settings.tls_cert))
    transport = httpx.HTTPTransport(verify=trusted, uds=str(settings.uds))
    with httpx.Client(transport=transport, base_url="https://localhost", timeout=30) as client:
        client.headers["Authorization"] = "Bearer secret"
        yield client


def test_the_name_of_a_file_that_is_not_utf_8_is_made_printable():
    file = Path(os.fsdecode(b"/models/caf\xe9\n2.gguf"))
    assert settings_of(model=file).name == "caf__2"


def test_a_folder_of_the_hub_has_its_id_and_a_link_its_own_name(tmp_path):
    snapshot = tmp_path / "models--org--some-model" / "snapshots" / "1f0c"
    snapshot.mkdir(parents=True)
    (tmp_path / "blob").touch()
    (snapshot / "a.gguf").symlink_to(tmp_path / "blob")
    assert settings_of(model=snapshot).names == ("org/some-model",)
    assert settings_of(model=snapshot / "a.gguf").names == ("a",)


def test_a_model_given_by_a_name_has_this_name_first():
    for name, names in (("TINY_ll", ("TINY_ll", "tiny_llama")), (str(MODEL), ("tiny_llama",))):
        options = command_parser().parse_args(["serve", "--model", name])
        assert server_settings(options).names == names


def test_names_and_adapters_are_listed_and_answer(ask):
    listed = ask.get("/v1/models").json()["data"]
    assert [it["id"] for it in listed] == ["first", "second", "mine"]
    assert listed[2]["parent"] == "first"
    for name in ("first", "second", "mine"):
        answer = ask.post("/v1/completions", json={"model": name, "prompt": [1], "max_tokens": 2})
        assert answer.status_code == 200 and answer.json()["model"] == name
        assert ask.get(f"/v1/models/{name}").json()["id"] == name
    assert ask.post("/v1/completions", json={"model": "x", "prompt": [1]}).status_code == 404


def test_paths_have_the_prefix_or_not(ask):
    for path, status in [
        ("/llm/v1/models", 200), ("/llm/health", 200), ("/llm/", 200), ("/llm", 404),
        ("/llmv1/models", 404), ("/llm/llm/health", 404), ("/llm//health", 404),
    ]:  # fmt: skip
        assert ask.get(path).status_code == status, path
    assert ask.get("/llm/openapi.json").json()["servers"] == [{"url": "/llm"}]
    assert ask.get("/llm/v1/models", headers={"Authorization": ""}).status_code == 401
    page = ask.get("/llm/", params={"key": "secret"}, headers={"Authorization": ""})
    assert page.headers["location"] == "./" and "Secure" in page.headers["set-cookie"]


def test_a_page_of_an_allowed_origin_may_call(ask):
    asked = {"Access-Control-Request-Method": "POST", "Authorization": ""}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-os"
    allowed = ask.options("/v1/completions", headers={"Origin": PAGE, **asked})
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == PAGE
    assert "x-stainless-os" in allowed.headers["access-control-allow-headers"]
    answer = ask.get("/v1/models", headers={"Origin": PAGE})
    assert answer.headers["access-control-allow-origin"] == PAGE
    assert "X-Request-Id" in answer.headers["access-control-expose-headers"]
    assert "access-control-allow-credentials" not in answer.headers
    refusal = ask.get("/v1/models", headers={"Origin": PAGE, "Authorization": ""})
    assert refusal.status_code == 401 and refusal.headers["access-control-allow-origin"] == PAGE
    body = {"prompt": [1], "max_tokens": 2, "stream": True}
    stream = ask.post("/v1/completions", headers={"Origin": PAGE}, json=body)
    assert stream.headers["access-control-allow-origin"] == PAGE and "[DONE]" in stream.text
    for other in ("https://other.example", PAGE + ".other", "null", PAGE.upper(), f"{PAGE}, *"):
        assert ask.options("/", headers={"Origin": other, **asked}).status_code == 400
        headers = ask.get("/v1/models", headers={"Origin": other}).headers
        assert "access-control-allow-origin" not in headers
    plain = ask.options("/v1/completions", headers={"Authorization": ""})
    assert plain.status_code == 401


def test_a_server_without_a_key_lets_its_origins_in():
    with running_server(settings_of(cors_origins=[PAGE], triton=False)) as server:
        for origin, status in ((PAGE, 200), (PAGE + ":1", 403), ("null", 403)):
            headers = {"Origin": origin}
            assert httpx.get(server.url + "/v1/models", headers=headers).status_code == status
        headers = {"Host": "page.example"}
        assert httpx.get(server.url + "/v1/models", headers=headers).status_code == 403


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(
            ("cors_origins", [text])
            for text in ("", "page.example", PAGE + "/", f"{PAGE}\r\nX: y", "https://a b", "null")
        ),
        *(("root_path", text) for text in ("llm", "/", "/llm/", "/a//b", "/a b", "/a\r\nb", "/é")),
        *(("served_model_name", names) for names in (["a", "a"], ["a", " "], ["a\nb"], [""])),
        *(("adapters", [(name, MODEL) for name in names]) for names in ("aa", " ")),
        ("tls_cert", MODEL / "config.json"),
        ("tls_key", MODEL / "config.json"),
    ],
)
def test_wrong_settings_are_named(field, value):
    with pytest.raises(ConfigError, match=field):
        settings_of(**{field: value})


@needs_openssl
def test_bad_certificates_are_one_sentence(tmp_path):
    good = new_certificate(tmp_path)
    (tmp_path / "other").mkdir()
    other = new_certificate(tmp_path / "other", "-passout", "pass:secret")
    for wrong in (
        {"tls_cert": MODEL / "config.json"},
        {"tls_key": good["tls_cert"]},
        {"tls_key": tmp_path / "none"},
        {"tls_cert": tmp_path},
        {"tls_cert": tmp_path / "a\0b"},
        other,  # its key is encrypted: nobody is asked for a password
    ):
        with pytest.raises(ConfigError, match="--tls-cert .* --tls-key ") as caught:
            settings_of(**{**good, **wrong})
        assert "\n" not in str(caught.value)


def test_a_stale_socket_is_replaced_and_nothing_else(tmp_path):
    path = tmp_path / "socket"
    bind_path(path).close()
    assert path.exists()  # a killed server leaves it
    with listening("", 0, path) as listener:
        listener.listen()
        with pytest.raises(ConfigError, match="--uds .* another server listens at it"):
            bind_path(path)
    assert not path.exists()
    path.write_text("important")
    with pytest.raises(ConfigError, match="something else at this path"):
        bind_path(path)
    assert path.read_text() == "important"
    link = tmp_path / "link"
    link.symlink_to(path)
    for wrong in (tmp_path, link, tmp_path / "none" / "socket", tmp_path / ("x" * 200), "\0a"):
        with pytest.raises(ConfigError, match="--uds"):
            bind_path(tmp_path / wrong)


def test_the_socket_of_a_later_server_stays(tmp_path):
    path = tmp_path / "socket"
    with listening("", 0, path):
        path.unlink()
        later = bind_path(path)
    assert path.exists()
    later.close()


def test_the_welcome_shows_how_to_call_a_socket(engine):
    settings = replace(engine._settings, uds="/run/a b")
    told = welcome(engine, settings, "http://localhost")
    assert "is served at /run/a b\n" in told and "live page" not in told
    assert "curl --unix-socket '/run/a b' http://localhost/v1/completions" in told


def test_an_adapter_that_cannot_be_read_ends_the_start(engine, tmp_path, server):
    engine._settings, before = (
        replace(engine._settings, adapters=[("x", tmp_path)]),
        engine._settings,
    )
    try:
        with pytest.raises(ConfigError, match=f"--adapter x={tmp_path}: "):
            server.run(engine.load_given_adapters())
    finally:
        engine._settings = before
    assert "x" not in engine.adapters


@pytest.mark.parametrize("host", ["a\udcffb", "a..b", "x" * 64, "a\0b"])
def test_a_host_that_is_not_a_name(host):
    with pytest.raises(ConfigError, match=r"^--host [^.]*(\.\.b)? --port 0 cannot be used: "):
        bind(host, 0)
