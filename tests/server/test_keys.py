"""Keys: their file, its reload, and the requests that the holder of each may have."""

import httpx
import pytest
from running_server import running_server, settings_of, wait_for

from gptmanager.errors import ConfigError
from gptmanager.server.errors import ApiError
from gptmanager.server.http.key_file import MAX_BYTES, ApiKey, read_key_file
from gptmanager.server.http.keys import ServerKeys, cookie_of

NAMED = "# who has which\nalice sk-alice 2\n\nbob   sk-bob\n"


def test_a_file_has_one_key_or_named_ones(tmp_path):
    file = tmp_path / "keys"
    for text, keys in [
        ("one", [ApiKey("one")]),
        ("one\r\n", [ApiKey("one")]),
        (NAMED, [ApiKey("sk-alice", "alice", 2), ApiKey("sk-bob", "bob")]),
        ("a\tsécret 1", [ApiKey("sécret", "a", 1)]),
    ]:
        file.write_text(text)
        assert list(read_key_file(file)) == keys
    assert "sk-alice" not in repr(keys)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "is empty"),
        (" three", "must not begin or end with a space"),
        ("# none\n\n", "must have at least one key"),
        ("#SECRET\n", "must have at least one key"),
        ("SECRET\nSECRET2", "line 1 must be NAME KEY"),
        ("a SECRET\nb SECRET", "line 2: the key is in the file twice"),
        ("a SECRET\na SECRET2", "line 2: the name is in the file twice"),
        ("a/b SECRET", "the name must be 1 to 64 letters"),
        ("\x1b[2J SECRET", "the name must be"),
        ("a SECRET 0", "MAX_REQUESTS"),
        ("a SECRET -1", "MAX_REQUESTS"),
        ("a SECRET " + "9" * 5000, "MAX_REQUESTS"),
        ("a SECRET ²", "MAX_REQUESTS"),
        ("a SECRET 1 2", "NAME KEY"),
        ("a SEC\0RET", "must be printable"),
        (b"a SECRET\xff", "must be UTF-8"),
        (b"a SECRET 1\n" * (MAX_BYTES // 8), "at most"),
    ],
)
def test_an_error_names_the_line_and_never_the_key(tmp_path, content, reason):
    file = tmp_path / "keys"
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match="api_key_file") as caught:
        settings_of(api_key_file=file)
    assert reason in str(caught.value) and "SECRET" not in str(caught.value)


def test_an_unreadable_file_is_one_sentence(tmp_path):
    for path in (tmp_path / "none", tmp_path, tmp_path / "a\0b"):
        with pytest.raises(ConfigError, match="api_key_file = .* cannot be read") as caught:
            settings_of(api_key_file=path)
        assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match="not both"):
        settings_of(api_key_file=tmp_path, api_key="a")


def test_a_file_is_reloaded_unless_it_is_wrong(tmp_path, caplog):
    file = tmp_path / "keys"
    file.write_text(NAMED)
    keys = ServerKeys(settings_of(api_key_file=file))
    assert keys.find("sk-bob").name == keys.find(b"sk-alice").name.replace("alice", "bob") == "bob"
    file.write_text("bob sk-bob-2")
    assert keys.find("sk-bob") is not None
    keys.reload()
    assert keys.find("sk-bob") is None and keys.find("sk-bob-2").name == "bob"
    file.write_text("nonsense\nnonsense")
    keys.reload()
    assert "the keys were not reloaded and stay as they are: api_key_file" in caplog.text
    assert keys.find("sk-bob-2") is not None
    for wrong in (None, "", "sk-bob", "\U0001f511", cookie_of(ApiKey("sk-bob-2"))):
        assert keys.find(wrong) is None
    assert keys.find_cookie(cookie_of(ApiKey("sk-bob-2"))).name == "bob"
    assert keys.find_cookie("sk-bob-2") is None


def test_a_quota_survives_a_reload(tmp_path):
    file = tmp_path / "keys"
    file.write_text(NAMED)
    keys = ServerKeys(settings_of(api_key_file=file))
    assert keys.reserve(100) is None  # no key: no quota
    keys.enter(keys.find("sk-alice"))
    assert keys.reserve(1) == "alice"
    for number, status in ((2, 429), (3, 400)):
        with pytest.raises(ApiError, match="of the key alice run or wait") as caught:
            keys.reserve(number)
        assert caught.value.status == status and caught.value.code == "quota_exceeded"
    file.write_text("alice sk-alice-2 3")
    keys.reload()
    assert keys.reserve(2) == "alice"
    with pytest.raises(ApiError):
        keys.reserve(1)
    keys.release("alice", 3)
    assert keys.reserve(3) == "alice"
    keys.enter(ApiKey("sk-bob", "bob"))
    assert keys.reserve(9) == "bob"


def test_a_quota_counts_what_runs_and_waits(tmp_path, caplog):
    """The log has the name of the key."""
    caplog.set_level("INFO", "gptmanager.requests")
    file = tmp_path / "keys"
    file.write_text(NAMED)
    settings = settings_of(api_key_file=file, served_model_name=("a", "b"), triton=False)
    body = {"model": "b", "prompt": [1], "max_tokens": 480, "ignore_eos": True, "stream": True}
    with running_server(settings) as server:
        post = f"{server.url}/v1/completions"
        alice, bob = ({"Authorization": f"Bearer sk-{name}"} for name in ("alice", "bob"))

        def ask(headers, **fields):
            given = {**body, "stream": False, "max_tokens": 1, **fields}
            return httpx.post(post, headers=headers, json=given, timeout=30)

        listed = httpx.get(f"{server.url}/v1/models", headers=bob).json()["data"]
        assert [it["id"] for it in listed] == ["a", "b"]
        assert ask(alice, n=3).status_code == 400
        with httpx.stream("POST", post, headers=alice, json={**body, "n": 2}) as stream:
            lines = stream.iter_lines()
            next(lines)
            server.engine.manager.pause_generation()  # the stream does not end meanwhile
            refused = ask(alice)
            assert refused.status_code == 429 and refused.headers["Retry-After"] == "1"
            assert refused.json()["error"]["code"] == "quota_exceeded"
            server.engine.manager.resume_generation()
            assert ask(bob, n=5).status_code == 200
        wait_for(lambda: not server.engine._calls)
        assert ask(alice, n=2).json()["model"] == "b"
    logged = [it.fields for it in caplog.records if it.name == "gptmanager.requests"]
    assert {line["key"] for line in logged} == {"alice", "bob"} and "sk-" not in caplog.text
