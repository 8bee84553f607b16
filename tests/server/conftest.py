"""Servers, one of each kind for all tests of this folder in a worker."""

from pathlib import Path

import httpx
import pytest
import torch
from running_server import RunningServer, running_server, settings_of


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="package")
def server(one_torch_thread, tmp_path_factory):
    with running_server(settings_of(adapter_dir=tmp_path_factory.mktemp("adapters"))) as running:
        yield running


@pytest.fixture(scope="package")
def scripted_qwen(one_torch_thread, tmp_path_factory):
    """A server whose model says what a test wants, with the template and the tags of Qwen."""
    from scripted_server import scripted_server

    template = Path(__file__).parent / "chat_templates" / "qwen.jinja"
    tags = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    folder = tmp_path_factory.mktemp("qwen")
    with scripted_server(folder, template, messages=[], tags=tags) as ask:
        yield ask


@pytest.fixture(scope="package")
def client(server):
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture
def engine(server):
    return server.engine


@pytest.fixture(autouse=True)
def nothing_comes_late(request):
    """Let servers that tests share do what follows their answers before the next test begins.

    They log and count then, which would be among what the next test asks for.
    """
    yield
    for it in request.node.funcargs.values():
        if isinstance(it, RunningServer):
            it.settle()
