"""Keys, bodies within their limit, and adapters: who may load which."""

import asyncio
from unittest.mock import Mock

import httpx
import pytest
from adapter_folders import save_output_adapter
from call_results import results_of
from running_server import MODEL, running_server, settings_of
from safetensors.torch import load_file, save_file
from starlette.requests import Request

from gptmanager.callbacks import load_peft_adapter
from gptmanager.server.engine.adapters import FIRST_OWN_TASK, Adapters
from gptmanager.server.engine.call import EngineRequest
from gptmanager.server.errors import ApiError
from gptmanager.server.http.hosts import needs_guard
from gptmanager.server.http.keys import bearer
from gptmanager.server.openai.models import _check_caller

KEY = "sécret"
HEADER = {"Authorization": f"Bearer {KEY}".encode()}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """With a key, a folder of adapters, and a small limit of bodies."""
    folder = tmp_path_factory.mktemp("adapters")
    settings = settings_of(api_key=KEY, adapter_dir=folder, max_body_bytes=1000)
    with running_server(settings) as server:
        yield server


@pytest.fixture
def with_key(guarded):
    with httpx.Client(base_url=guarded.url, headers=HEADER, timeout=30) as client:
        yield client


def test_the_key_guards_everything_but_health(guarded, with_key):
    for path in ("/v1/models", "/version", "/", "/nothing", "/docs"):
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Basic {KEY}".encode()},
        ):
            response = httpx.get(guarded.url + path, headers=headers)
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
            assert response.json()["error"]["code"] == "invalid_api_key"
    for path in ("/health", "/health/live", "/health/ready"):
        assert httpx.get(guarded.url + path).status_code == 200
    assert with_key.get("/v1/models").status_code == 200
    assert with_key.get("/nothing").status_code == 404


def test_the_page_keeps_a_cookie_instead_of_the_key(guarded):
    with httpx.Client(base_url=guarded.url, params={}) as browser:
        first = browser.get("/", params={"key": KEY, "scale": "2"})
        assert first.status_code == 303 and first.headers["location"] == "./?scale=2"
        cookie = first.headers["set-cookie"]
        assert "path" not in cookie.lower()  # a proxy's prefix is the cookie's path then
        assert KEY not in cookie and "HttpOnly" in cookie and "samesite=strict" in cookie.lower()
        assert browser.get("/").status_code == 200
        with browser.stream("GET", "/live/events") as events:
            assert events.status_code == 200
        assert browser.get("/v1/models").status_code == 401
    assert httpx.get(guarded.url, params={"key": "wrong"}).status_code == 401
    assert httpx.get(guarded.url, cookies={"gptmanager_key": "0" * 64}).status_code == 401
    assert httpx.get(guarded.url + "/v1/models", params={"key": KEY}).status_code == 401


def test_the_page_is_opened_below_a_proxy_s_prefix_too(guarded):
    for path, place in [("/", "./"), ("/live/events", "./events")]:
        answer = httpx.get(guarded.url + path, params={"key": KEY})
        assert answer.headers["location"] == place
        given = httpx.URL("https://somewhere.example/llm" + path).join(place)
        assert given == httpx.URL("https://somewhere.example/llm" + path)


ROUTES = ("/", "/health", "/metrics", "/v1/models", "/v2", "/live/events", "/nothing")
STRANGERS = [
    {"Host": "somebody.example"},
    {"Host": "somebody.example:8000"},
    {"Host": "localhost.somebody.example"},
    {"Host": "[::2]"},
    {"Host": ""},
    {"Origin": "https://somebody.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
]


@pytest.mark.parametrize("headers", STRANGERS, ids=str)
def test_other_web_pages_are_refused(server, client, headers):
    for path in ROUTES:
        answer = client.get(path, headers=headers)
        assert answer.status_code == 403 and "--allowed-host" in answer.text, path
    body = b'{"prompt": [5], "max_tokens": 1}'
    posted = client.post(
        "/v1/completions", content=body, headers={**headers, "Content-Type": "text/plain"}
    )
    assert posted.status_code == 403
    assert server.engine.counts == (0, 0)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "LOCALHOST:1"},
        {"Host": "127.0.0.1"},
        {"Host": "[::1]:8000"},
        {"Host": "[::ffff:127.0.0.1]:8000"},
        {"Host": "localhost."},
        {"Origin": "http://localhost:3000"},
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},  # a link leads here
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://127.0.0.1:1"},
    ],
    ids=str,
)
def test_this_machine_gets_in_by_any_of_its_names(client, headers):
    assert client.get("/health", headers=headers).status_code == 200


def test_other_host_names_of_the_server_must_be_configured():
    def needs(**fields):
        settings = settings_of(**fields)
        return needs_guard(settings.host, settings)

    assert needs() and needs(host="::1") and needs(host="localhost")
    assert needs(host="::ffff:127.0.0.1")
    assert not needs(api_key="a") and not needs(host="0.0.0.0")
    assert needs(host="0.0.0.0", allowed_hosts=["a"]) and needs(api_key="a", allowed_hosts=["a"])
    with running_server(settings_of(allowed_hosts=["Models.Example"])) as server:
        for headers, status in [
            ({"Host": "models.example:80", "Origin": "https://models.example"}, 200),
            ({"Host": "localhost"}, 200),
            ({"Host": "models.example", "Origin": "https://other.example"}, 403),
        ]:
            assert httpx.get(server.url + "/health", headers=headers).status_code == status


@pytest.mark.parametrize("encoding", ["gzip", "br", "x" * 5000])
def test_a_compressed_body_is_refused_by_name(client, encoding):
    answer = client.post("/tokenize", content=b"", headers={"Content-Encoding": encoding})
    assert answer.status_code == 415 and answer.json()["error"]["param"] == "content-encoding"
    answer = client.post(
        "/tokenize", json={"prompt": "a"}, headers={"Content-Encoding": "identity"}
    )
    assert answer.status_code == 200


def test_keys_are_compared_whatever_they_hold():
    assert bearer("bearer  x ") == b"x" and bearer("x") is None and bearer(None) is None


def test_a_large_body_is_a_413(with_key):
    assert with_key.post("/tokenize", json={"prompt": "x" * 900}).status_code == 200
    told = with_key.post("/tokenize", json={"prompt": "x" * 1000})
    pieces = with_key.post(
        "/tokenize", content=iter([b'{"prompt":"', b"x" * 600, b"x" * 600, b'"}'])
    )
    for response in (told, pieces):
        assert response.status_code == 413
        assert "--max-body-bytes allows 1000" in response.json()["error"]["message"]


def load(client, name, path):
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)})


def greedy(server, adapter=None):
    async def main():
        request = EngineRequest([5, 6, 7], 12, adapter=adapter, end_id=-1)
        async with server.engine.submit([request]) as call:
            return (await results_of(call))[0].generated_ids[0]

    return server.run(main())


def test_an_adapter_is_loaded_used_and_unloaded(guarded, with_key):
    save_output_adapter(guarded.settings.adapter_dir / "one")
    loaded = load(with_key, "uno", "one")
    assert loaded.status_code == 200
    listed = {it["id"]: it for it in with_key.get("/v1/models").json()["data"]}
    assert listed["tiny_llama"]["parent"] is None and listed["uno"]["parent"] == "tiny_llama"
    assert with_key.get("/v1/models/uno").json() == listed["uno"] == loaded.json()
    assert greedy(guarded, "uno") != greedy(guarded)

    again = load(with_key, "uno", "one")
    assert again.status_code == 400 and "already loaded" in again.json()["error"]["message"]

    gone = with_key.post("/v1/unload_lora_adapter", json={"lora_name": "uno"})
    assert gone.status_code == 200
    with pytest.raises(ApiError) as caught:
        greedy(guarded, "uno")
    assert caught.value.status == 404
    assert with_key.post("/v1/unload_lora_adapter", json={"lora_name": "uno"}).status_code == 404


def test_the_limit_of_loaded_adapters_includes_those_that_are_being_read(tmp_path):
    adapters = Adapters(MODEL, tmp_path, 2)
    save_output_adapter(tmp_path / "one")
    adapters.add(adapters.read("uno", "one"))
    with adapters.room("due"):
        with pytest.raises(ApiError, match="--max-adapters = 2") as caught, adapters.room("tre"):
            raise AssertionError("there is no room")
    assert (caught.value.status, caught.value.code) == (400, "too_many_adapters")
    with adapters.room("tre"):
        adapters.add(adapters.read("tre", "one"))
    with pytest.raises(ApiError), adapters.room("due"):
        raise AssertionError("there is no room")
    adapters.remove("uno")
    with adapters.room("due"):
        pass


def test_an_adapter_that_left_the_cache_is_sent_again(guarded, with_key):
    save_output_adapter(guarded.settings.adapter_dir / "two", seed=2)
    assert load(with_key, "due", "two").status_code == 200
    before = greedy(guarded, "due")
    guarded.engine.manager.forget_adapter(guarded.engine.adapters.find("due").task_id)
    finished = dict(guarded.engine.metrics.requests.finished)
    assert greedy(guarded, "due") == before
    guarded.wait_idle()
    finished["length"] += 1  # and no error: the first try is no request of its own
    assert guarded.engine.metrics.requests.finished == finished


def test_weights_of_a_client_never_answer_for_the_name_of_a_loaded_adapter(guarded, with_key):
    save_output_adapter(guarded.settings.adapter_dir / "named", seed=6)
    weights, config = load_peft_adapter(
        save_output_adapter(guarded.settings.adapter_dir / "foreign")
    )
    assert load(with_key, "sei", "named").status_code == 200
    before, task = greedy(guarded, "sei"), guarded.engine.adapters.find("sei").task_id
    guarded.engine.manager.forget_adapter(task)  # like an eviction for others

    async def as_a_client(task_id, tensors):
        request = EngineRequest([5, 6, 7], 2, lora_task_id=task_id, **tensors)
        async with guarded.engine.submit([request]) as call:
            return await results_of(call)

    for own in (task, FIRST_OWN_TASK, 2**64 - 1):
        for tensors in ({}, {"lora_weights": weights, "lora_config": config}):
            with pytest.raises(ApiError, match=f"lora_task_id = {own} is outside 0..") as caught:
                guarded.run(as_a_client(own, tensors))
            assert caught.value.status == 400 and caught.value.param == "lora_task_id"
    assert guarded.run(
        as_a_client(FIRST_OWN_TASK - 1, {"lora_weights": weights, "lora_config": config})
    )
    assert greedy(guarded, "sei") == before
    guarded.wait_idle()


def test_of_two_adapters_that_come_at_once_by_one_name_one_is_loaded(guarded):
    save_output_adapter(guarded.settings.adapter_dir / "twin", seed=3)

    async def both():
        loads = [guarded.engine.load_adapter("twin", "twin") for _ in range(2)]
        return await asyncio.gather(*loads, return_exceptions=True)

    adapter, error = sorted(guarded.run(both()), key=lambda found: isinstance(found, ApiError))
    assert error.status == 400 and "already loaded" in error.message
    assert guarded.engine.adapters.find("twin") is adapter
    guarded.wait_idle()


def test_an_adapter_may_be_unloaded_while_it_runs(guarded, with_key):
    save_output_adapter(guarded.settings.adapter_dir / "five", seed=5)
    assert load(with_key, "cinque", "five").status_code == 200
    whole = greedy(guarded, "cinque")

    async def main():
        request = EngineRequest([5, 6, 7], 12, adapter="cinque", end_id=-1, is_streaming=True)
        async with guarded.engine.submit([request]) as call:
            parts = call.parts()
            first = await anext(parts)
            guarded.engine.unload_adapter("cinque")
            rest = [part async for _, part in parts]
        return sum((part.tokens for part in (first[1], *rest)), [])

    assert tuple(guarded.run(main())) == whole
    guarded.wait_idle()


def test_only_adapters_below_the_folder_are_loaded(guarded, with_key, tmp_path):
    outside = save_output_adapter(tmp_path / "outside")
    link = guarded.settings.adapter_dir / "link"
    link.symlink_to(outside)
    for path in (outside, "../outside", "link"):
        response = load(with_key, "tre", path)
        assert response.status_code == 403, path
        assert "--adapter-dir" in response.json()["error"]["message"]


def test_an_adapter_of_another_model_is_refused(guarded, with_key):
    root = guarded.settings.adapter_dir
    (root / "empty").mkdir()
    save_output_adapter(root / "narrow", width=64)
    save_output_adapter(root / "wide", width=256)
    for path in ("empty", "nowhere", "narrow", "wide", "a\0b"):
        response = load(with_key, "quattro", path)
        assert response.status_code == 400, (path, response.text)
        assert response.json()["error"]["param"] == "lora_path"
    assert "256 outputs" in load(with_key, "quattro", "wide").json()["error"]["message"]
    assert load(with_key, "tiny_llama", "empty").status_code == 400
    assert load(with_key, "", "empty").json()["error"]["param"] == "lora_name"
    assert "quattro" not in guarded.engine.adapters
    guarded.wait_idle()


def test_an_adapter_that_fails_its_first_request_leaves_the_cache(guarded, with_key, monkeypatch):
    folder = save_output_adapter(guarded.settings.adapter_dir / "huge")
    (file,) = folder.glob("*.safetensors")
    save_file({name: it * 1e30 for name, it in load_file(file).items()}, file)
    forget = Mock(wraps=guarded.engine.manager.forget_adapter)
    monkeypatch.setattr(guarded.engine.manager, "forget_adapter", forget)
    assert "NaN" in load(with_key, "sette", "huge").json()["error"]["message"]
    forget.assert_called_once()
    assert "sette" not in guarded.engine.adapters
    guarded.wait_idle()


def test_without_a_key_adapters_are_for_this_machine(server):
    for host, origin, is_local in [
        ("127.0.0.1", None, True),
        ("::ffff:127.0.0.1", None, True),
        ("10.0.0.1", None, False),
        ("127.0.0.1", b"http://localhost:8000", True),
        ("::1", b"http://[::ffff:127.0.0.1]:8000", True),
        ("127.0.0.1", b"https://somebody.example", False),  # in a browser of this machine
        ("127.0.0.1", b"null", False),
    ]:
        headers = [] if origin is None else [(b"origin", origin)]
        request = Request({"type": "http", "client": (host, 1), "headers": headers})
        if is_local:
            _check_caller(request, server.settings)
        else:
            with pytest.raises(ApiError) as caught:
                _check_caller(request, server.settings)
            assert caught.value.status == 403


def test_a_manager_without_room_for_adapters_says_so(tmp_path):
    from gptmanager import PeftCacheManagerConfig

    config = PeftCacheManagerConfig(host_cache_size=0)
    params = {"peft_cache_manager_config": config}
    save_output_adapter(tmp_path / "one")
    with running_server(settings_of(params=params, adapter_dir=tmp_path)) as server:
        with httpx.Client(base_url=server.url) as client:
            response = load(client, "uno", "one")
            assert response.status_code == 501
            body = {"lora_name": "uno"}
            assert client.post("/v1/unload_lora_adapter", json=body).status_code == 501
    assert load_peft_adapter(tmp_path / "one")
