"""Answers over HTTP: refusals, warnings, and streams joined to what the whole answer says."""

import json
import re

import pytest

TEXTS = re.compile(r'299 - "((?:[^"\\]|\\.)*)"')


def refusal(response, status):
    assert response.status_code == status, response.text
    assert set(response.json()) == {"error"}
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


def frames(response):
    *found, done, end = response.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    return [json.loads(frame.removeprefix("data: ")) for frame in found]


def joined(found, part):
    """`part` of a choice added to what is there: texts and lists grow, all else is set once."""
    for key, value in part.items():
        before = found.get(key)
        if before is None or key in ("index", "finish_reason", "stop_reason"):
            assert before is None or before == value or key == "index"
            found[key] = value
        elif isinstance(value, str):
            found[key] = before + value
        elif isinstance(value, list):
            found[key] = [*before, *value]
        elif isinstance(value, dict):
            found[key] = joined(dict(before), value)
    return found


def choices_of(chunks):
    found = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        if index in found:
            assert found[index]["finish_reason"] is None  # nothing comes behind the end
        found[index] = joined(found.get(index, {}), choice)
    return [found[index] for index in sorted(found)]


def same(mine, theirs):
    """Equal, numbers up to rounding."""
    if isinstance(theirs, dict):
        assert mine.keys() == theirs.keys()
        for key in theirs:
            same(mine[key], theirs[key])
    elif isinstance(theirs, list):
        assert len(mine) == len(theirs)
        for one, other in zip(mine, theirs, strict=True):
            same(one, other)
    elif isinstance(theirs, float):
        assert mine == pytest.approx(theirs, abs=1e-4)
    else:
        assert mine == theirs


def texts_of(headers):
    """The texts of a header, with a proof that it is nothing but a list of quoted texts."""
    value = headers.get("Warning", "")
    assert TEXTS.sub("", value).replace(", ", "") == ""
    return [re.sub(r"\\(.)", r"\1", text) for text in TEXTS.findall(value)]
