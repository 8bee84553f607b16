"""The chat on the server's page: what it sends, what it shows, and that it believes nothing."""

import base64
import hashlib
import json
import re

import httpx
import pytest
from chromium import EXECUTABLE, Chromium
from running_server import running_server, settings_of

needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium")
MARKUP = "<img src=x onerror=document.title='hacked'>"


@pytest.fixture(scope="module")
def guarded():
    with running_server(settings_of(api_key="a key", triton=False)) as server:
        yield server


def test_the_policy_allows_these_scripts_and_styles_and_nothing_else(client):
    page = client.get("/")
    policy = page.headers["content-security-policy"]
    for name in ("script", "style"):
        parts = re.findall(f"<{name}>(.*?)</{name}>", page.text, re.DOTALL)
        digests = [base64.b64encode(hashlib.sha256(it.encode()).digest()).decode() for it in parts]
        allowed = " ".join(f"'sha256-{one}'" for one in digests)
        assert len(parts) == 2 and f"{name}-src {allowed};" in policy
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert page.text.count("</body>") == 1
    assert not re.search(r"(src|href)=.(?!data:)|@import|https?://(?!www\.w3\.org)", page.text)
    assert "innerHTML" not in page.text.partition('id="chat"')[2]


@needs_chromium
@pytest.mark.xdist_group("chromium")
def test_a_chat_in_a_browser(guarded, tmp_path):
    with Chromium(tmp_path) as browser:
        lines = "[...document.querySelectorAll('#chat-log > div')]"
        log = f"{lines}.map(it => [it.className, it.textContent])"

        def fill(name, value):
            field = f"document.getElementById('chat-{name}')"
            browser.evaluate(f"{field}.value = {value!r}, {field}.onchange?.()")

        def send(text):
            fill("text", text)
            browser.evaluate("document.getElementById('chat-send').click()")
            browser.wait_for("!document.getElementById('chat-send').disabled")

        assert httpx.get(guarded.url).status_code == 401  # the page itself needs the key
        browser.call("Page.navigate", url=f"{guarded.url}/?key=a%20key")
        browser.wait_for("document.getElementById('chat-open') !== null")
        browser.errors.clear()
        browser.evaluate("document.getElementById('chat-open').click()")
        browser.wait_for("document.getElementById('chat-note').textContent.includes('key')")
        fill("key", "a key")
        browser.wait_for("document.getElementById('chat-model').value === 'tiny_llama'")
        browser.errors.clear()  # the refusal without the key
        fill("temperature", "0")
        fill("max_tokens", "4")
        send(f"17 + 25 = {MARKUP}")
        shown = browser.evaluate(log)
        assert shown[0] == ["user", f"17 + 25 = {MARKUP}"] and shown[1][0] == "assistant"
        assert "tokens" in browser.evaluate("document.getElementById('chat-note').textContent")
        fill("more", '{"stream": false}')  # the box reads streams
        send("again")
        assert browser.evaluate(log)[-1][0] == "assistant"
        fill("more", '{"top_k": "x"}')
        send("again")
        assert browser.evaluate(log)[-1] == ["error", "top_k must be an integer, got 'x'"]
        assert browser.evaluate("document.getElementById('chat-text').value") == "again"
        fill("more", "nonsense")
        send("again")
        assert browser.evaluate(log)[-1][0] == "error"
        browser.evaluate("document.getElementById('chat-clear').click()")
        assert browser.evaluate(log) == []
        fill("more", "")
        fill("max_tokens", "400")
        fill("text", "a long answer")
        browser.evaluate("document.getElementById('chat-send').click()")
        browser.evaluate("document.getElementById('chat-clear').click()")  # ends the answer, too
        browser.wait_for("!document.getElementById('chat-send').disabled")
        fill("max_tokens", "4")
        browser.evaluate("own = fetch, fetch = (url, o) => (sent = o.body, own(url, o)), 0")
        send("a new chat")
        assert json.loads(browser.evaluate("sent"))["messages"] == [
            {"role": "user", "content": "a new chat"}
        ]
        browser.evaluate("fetch = () => Promise.reject(new TypeError('Failed to fetch')), 0")
        send("again")
        assert browser.evaluate(log)[-1] == ["error", "The server cannot be reached"]
        browser.evaluate(
            "document.getElementById('chat').onkeydown({key: 'Escape', stopPropagation() {}}), 0"
        )
        assert browser.evaluate("document.activeElement.id") == "chat-open"
        assert browser.evaluate("document.title") != "hacked"
        assert not [it for it in browser.errors if "400" not in it]
