"""The header `Warning`: what it says, how much of it, and that no client writes headers by it."""

import httpx
import pytest
from http_answers import texts_of
from hypothesis import given
from hypothesis import strategies as st
from running_server import running_server, settings_of

from gptmanager.server.http.warning_header import Warnings

ADD = [{"role": "user", "content": "17 + 25 ="}]


def test_without_warnings_there_is_no_header():
    warnings = Warnings()
    warnings.add_ignored([], "ignored")
    assert warnings.headers() == {}


def test_each_warning_is_there_once_in_order():
    warnings = Warnings()
    for text in ("b", 'say "a\\b"', "b"):
        warnings.add(text)
    assert warnings.headers()["Warning"] == r'299 - "b", 299 - "say \"a\\b\""'
    assert texts_of(warnings.headers()) == ["b", 'say "a\\b"']


def test_names_are_listed_up_to_a_limit():
    warnings = Warnings()
    warnings.add_ignored([f"f{index}" for index in range(12)], "ignored")
    assert texts_of(warnings.headers()) == [
        "ignored: f0, f1, f2, f3, f4, f5, f6, f7, f8, f9 and 2 more"
    ]


@given(st.lists(st.text(max_size=400), max_size=20))
def test_no_text_leaves_its_quotes_or_grows_without_end(texts):
    warnings = Warnings()
    for text in texts:
        warnings.add(text)
    warnings.add_ignored(texts, "ignored")
    value = warnings.headers().get("Warning", "")
    assert len(texts_of(warnings.headers())) <= 9
    assert len(value) <= 9 * (2 * 303 + 20)
    assert all(" " <= letter <= "~" for letter in value)


def test_a_million_letters_are_cut():
    warnings = Warnings()
    warnings.add("x" * 10**6)
    warnings.add_ignored(["y" * 10**6], "ignored")
    assert len(warnings.headers()["Warning"]) < 600
    warnings = Warnings()
    warnings.add("x" * 300)
    warnings.add("y" * 301)
    assert texts_of(warnings.headers()) == ["x" * 300, f"{'y' * 300}..."]


@pytest.fixture(scope="module")
def lenient(one_torch_thread):
    with running_server(settings_of(lenient=True)) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "17 + 25 =", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": ADD, "max_tokens": 2}),
    ],
)
def test_a_lenient_server_names_unknown_fields(lenient, path, body, stream):
    name = 'x"\r\nSet-Cookie: a=b'
    answer = httpx.post(lenient.url + path, json={**body, "stream": stream, name: 1, "top_q": 2})
    assert answer.status_code == 200, answer.text
    (text,) = texts_of(answer.headers)
    assert text.startswith("unknown fields are ignored: ") and text.endswith(", top_q")
    assert "Set-Cookie" in text and "set-cookie" not in answer.headers
