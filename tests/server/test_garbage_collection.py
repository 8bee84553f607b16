"""A server exempts its objects from garbage collection, unless its host has done so."""

import gc

import pytest

from gptmanager.server import serving


@pytest.mark.parametrize(
    ("frozen_objects", "expected"), [(0, ["collect", "freeze", "unfreeze"]), (7, [])]
)
def test_only_what_no_host_has_frozen_is_frozen(monkeypatch, frozen_objects, expected):
    calls = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: frozen_objects)
    for name in ("collect", "freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, lambda name=name: calls.append(name))
    with serving._frozen():
        assert calls == expected[:2]
    assert calls == expected
