"""The OpenAPI document describes the server; requests made up from it never make it fail."""

import ast
import re
from pathlib import Path

import pytest
from fuzz import FUZZ
from http_answers import refusal
from hypothesis import given, settings

from gptmanager.server import errors
from gptmanager.server.http.idempotency import PATHS
from gptmanager.server.openapi import Endpoint, _path, document
from gptmanager.server.triton import described
from gptmanager.server.triton.http import UNSUPPORTED_PATHS

LIMITS = {  # path -> the field that limits the new tokens
    "/v1/completions": "max_tokens",
    "/v1/chat/completions": "max_tokens",
    "/v1/messages": "max_tokens",
    "/v1/responses": "max_output_tokens",
}


def test_every_endpoint_is_described(server, client):
    described = set(client.get("/openapi.json").json()["paths"])
    there = {route.path for route in server.server.config.app.routes}
    undescribed = {"/openapi.json", "/", "/metrics", "/live/events", "/events", *UNSUPPORTED_PATHS}
    assert {path.replace(":path", "") for path in there - undescribed} == described


def test_of_triton_s_calls_only_infer_is_answered_with_bytes():
    for path, methods in described.paths().items():
        for operation in methods.values():
            content = operation["responses"]["200"].get("content", {})
            assert ("application/octet-stream" in content) == path.endswith("/infer"), path
            # the checks answer without a body, also if they fail
            assert ("content" in operation["responses"]["503"]) == bool(content), path


def test_an_input_of_triton_with_one_element_is_not_a_list():
    for path, methods in described.paths().items():
        if path.endswith("/generate"):
            content = methods["post"]["requestBody"]["content"]["application/json"]
            tokens = content["schema"]["anyOf"][0]["properties"]
            assert tokens["request_output_len"]["type"] == "integer"
            as_list, as_element = tokens["input_ids"]["anyOf"]
            assert as_list == {"type": "array", "items": as_element}


def raised():
    """The statuses that the server's source passes to ApiError, and those of the router."""
    found = {404, 405, *(status for _, status in errors._STATUS_OF)}
    for file in Path(errors.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "ApiError":
                values = [getattr(part, "value", None) for part in ast.walk(node.args[0])]
                found |= {value for value in values if isinstance(value, int)}
    return found


def test_every_status_of_an_error_is_described():
    assert raised() == set(errors.STATUSES)
    page = Path(__file__).resolve().parents[2] / "docs" / "http_api.md"
    section = page.read_text(encoding="utf-8").partition("\n## Errors\n")[2]
    rows = re.findall(r"^\| (\d{3}) \|", section.partition("\n## ")[0], re.MULTILINE)
    assert rows == [str(status) for status in sorted(errors.STATUSES)]
    # a path does not list what another method of it would get
    known = {str(status) for status in errors.STATUSES} - {"405"}
    for path, methods in document()["paths"].items():
        for operation in methods.values():
            missing = known - set(operation["responses"])
            if path.startswith("/health"):
                assert missing == {"401", "404", "413", "415", "422", "501", "504"}
            else:
                assert missing == (set() if path in PATHS else {"422"}), path


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_every_count_of_the_usage_is_described(client, path):
    messages = [{"role": "user", "content": "a"}]
    prompt = {"messages": messages} if "chat" in path else {"prompt": "a"}
    usage = client.post(path, json={**prompt, "max_tokens": 1}).json()["usage"]
    answer = document()["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]
    described = answer["schema"]["properties"]["usage"]["properties"]
    assert usage.keys() == described.keys()
    for name in ("prompt_tokens_details", "completion_tokens_details"):
        assert usage[name].keys() == described[name]["properties"].keys()


def test_links_lead_to_what_is_described():
    paths = document()["paths"]
    links = [
        response["links"]["next"]["operationRef"]
        for methods in paths.values()
        for operation in methods.values()
        for response in operation["responses"].values()
        if "links" in response
    ]
    assert len(links) == 3
    for link in links:
        _, _, path, method = link.split("/")
        assert method in paths[path.replace("~1", "/")]


def test_an_endpoint_with_a_body_may_have_another_method_than_post():
    given = Endpoint("/a", "replace it", {}, method="put")
    assert [*_path(given, closed=True)] == ["put"]


def test_a_lenient_server_says_so():
    def completions(**options):
        path = document(**options)["paths"]["/v1/completions"]["post"]
        return path["requestBody"]["content"]["application/json"]["schema"]

    assert completions()["additionalProperties"] is False
    assert "additionalProperties" not in completions(lenient=True)
    assert "security" in document(has_key=True)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/load_lora_adapter",
    ],
)
def test_bodies_made_up_from_the_document_are_answered(client, path):
    schemathesis = pytest.importorskip(
        "schemathesis", reason="needs schemathesis, which makes up the bodies"
    )
    schema = schemathesis.openapi.from_dict(document())

    @settings(max_examples=4 * FUZZ, deadline=None)
    @given(case=schema[path]["POST"].as_strategy())
    def ask(case):
        limit = LIMITS.get(path)
        body = case.body if limit is None else {**case.body, limit: 1}
        response = client.post(path, json=body)
        assert response.status_code < 500, response.text
        if response.status_code != 200 and "messages" in path:
            assert response.json()["type"] == "error"
        elif response.status_code != 200:
            refusal(response, response.status_code)

    ask()


@pytest.mark.parametrize("path", ["infer", "generate", "generate_stream"])
def test_tensors_made_up_from_the_document_are_answered(client, path):
    schemathesis = pytest.importorskip(
        "schemathesis", reason="needs schemathesis, which makes up the bodies"
    )
    schema = schemathesis.openapi.from_dict(document())
    most = {"max_tokens": 1, "request_output_len": 1}

    @settings(max_examples=5 * FUZZ, deadline=None)
    @given(case=schema[f"/v2/models/{{name}}/{path}"]["POST"].as_strategy())
    def ask(case):
        body = {key: most.get(key, value) for key, value in case.body.items()}
        response = client.post(case.formatted_path, json=body)
        assert response.status_code < 500 or response.status_code == 501, response.text
        if response.status_code != 200:
            assert isinstance(response.json()["error"], str)

    ask()


def test_every_field_has_its_word():
    path = document()["paths"]["/v1/completions"]["post"]
    schema = path["requestBody"]["content"]["application/json"]["schema"]
    assert schema["required"] == ["prompt"]
    assert {"anyOf", "description"} == set(schema["properties"]["n"])


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_made_up_ids_of_responses_are_not_found(client, method):
    schemathesis = pytest.importorskip(
        "schemathesis", reason="needs schemathesis, which makes up the ids"
    )
    schema = schemathesis.openapi.from_dict(document())

    @settings(max_examples=3 * FUZZ, deadline=None)
    @given(case=schema["/v1/responses/{response_id}"][method].as_strategy())
    def ask(case):
        assert client.request(method, case.formatted_path).status_code in (404, 405)

    ask()
