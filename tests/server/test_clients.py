"""Clients and agent libraries that people use, unmodified: each test runs where its client is
installed (`pip install -e '.[test-clients]'`).
"""

import json
import shutil
import subprocess
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from pydantic import BaseModel

AI_SDK = Path(__file__).parent / "ai_sdk"
CALL = '<tool_call>\n{"name": "look", "arguments": {"city": "Rome"}}\n</tool_call>'
THOUGHT = "<think>\nI look.\n</think>\n\n"
ROME = '{"city": "Rome"}'
NAME, ASKS = "scripted", "How is the weather in Rome?"

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of the clients


class Place(BaseModel):
    """A place."""

    city: str


def look(city: str) -> str:
    """Look at the weather of a city."""
    return f"sunny in {city}"


@pytest.fixture
def server(scripted_qwen, monkeypatch):
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        monkeypatch.setenv(name, "none")
    monkeypatch.setenv("OPENAI_BASE_URL", f"{scripted_qwen.url}/v1")
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("LANGSMITH_TRACING", "false")
    return scripted_qwen


def needs(name):
    """Skip a test, before its server starts, where a client is not installed."""
    is_there = find_spec(name.partition(".")[0]) is not None
    return pytest.mark.skipif(not is_there, reason=f"needs {name}, of the extra test-clients")


@needs("agents")
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_openai_agents(server, api):
    agents = import_module("agents")
    agents.set_tracing_disabled(True)
    kinds = {
        "chat": agents.OpenAIChatCompletionsModel,
        "responses": agents.OpenAIResponsesModel,
    }
    from openai import AsyncOpenAI

    client = AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    model = kinds[api](model=NAME, openai_client=client)
    tool = agents.function_tool(look)
    agent = agents.Agent(name="a", instructions="Look.", model=model, tools=[tool])
    server.says(f"{THOUGHT}{CALL}", "It is sunny.")
    result = agents.Runner.run_sync(agent, ASKS)
    assert result.final_output == "It is sunny."
    assert "sunny in Rome" in str(result.to_input_list())
    server.says("42", "43")
    again = agents.Runner.run_sync(
        agent, [*result.to_input_list(), {"role": "user", "content": "b"}]
    )
    assert again.final_output == "42"


@needs("langchain_openai")
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_langchain(server, api):
    openai = import_module("langchain_openai")
    model = openai.ChatOpenAI(
        model=NAME, base_url=f"{server.url}/v1", api_key="none", max_retries=0,
        use_responses_api=api == "responses", temperature=0,
    )  # fmt: skip
    server.says("42 and more")
    assert model.invoke(ASKS).text == "42 and more"
    assert "".join(one.text for one in again(server, "42 and more", model.stream, ASKS)) == (
        "42 and more"
    )
    server.says(CALL)
    message = model.bind_tools([look]).invoke(ASKS)
    assert [(one["name"], one["args"]) for one in message.tool_calls] == [
        ("look", {"city": "Rome"})
    ]
    from langchain_core.messages import HumanMessage, ToolMessage

    result = ToolMessage("sunny", tool_call_id=message.tool_calls[0]["id"])
    server.says("Sunny.")
    last = model.bind_tools([look]).invoke([HumanMessage(ASKS), message, result])
    assert last.text == "Sunny."
    server.says(ROME)
    found = model.with_structured_output(Place, method="json_schema").invoke(ASKS)
    assert found.city == "Rome"


@needs("langchain_anthropic")
def test_langchain_with_anthropic(server):
    anthropic = import_module("langchain_anthropic")
    model = anthropic.ChatAnthropic(
        model=NAME, base_url=server.url, api_key="none", max_retries=0, max_tokens=200
    )
    server.says(f"{THOUGHT}42")
    message = model.invoke(ASKS)
    assert message.text == "42"
    server.says("43")
    assert (
        "".join(one.text for one in model.stream([("user", ASKS), message, ("user", "b")])) == "43"
    )
    server.says(CALL)
    assert model.bind_tools([look]).invoke(ASKS).tool_calls[0]["args"] == {"city": "Rome"}


@needs("llama_index")
def test_llama_index(server):
    own = import_module("llama_index.llms.openai_like")
    from llama_index.core.llms import ChatMessage
    from llama_index.core.tools import FunctionTool

    model = own.OpenAILike(
        model=NAME, api_base=f"{server.url}/v1", api_key="none", is_chat_model=True,
        is_function_calling_model=True, context_window=4096, max_retries=0,
    )  # fmt: skip
    ask = [ChatMessage(role="user", content=ASKS)]
    server.says("42 and more")
    assert model.chat(ask).message.content == "42 and more"
    server.says("42 and more")
    assert "".join(one.delta or "" for one in model.stream_chat(ask)) == "42 and more"
    server.says(CALL)
    tool = FunctionTool.from_defaults(look)
    response = model.chat_with_tools([tool], chat_history=ask)
    (call,) = model.get_tool_calls_from_response(response)
    assert (call.tool_name, call.tool_kwargs) == ("look", {"city": "Rome"})


@needs("pydantic_ai")
@pytest.mark.parametrize("api", ["chat", "responses"])
def test_pydantic_ai(server, api):
    own = import_module("pydantic_ai")
    models = import_module("pydantic_ai.models.openai")
    providers = import_module("pydantic_ai.providers.openai")
    kind = models.OpenAIChatModel if api == "chat" else models.OpenAIResponsesModel
    provider = providers.OpenAIProvider(base_url=f"{server.url}/v1", api_key="none")
    agent = own.Agent(kind(NAME, provider=provider), tools=[look], instructions="Look.")
    server.says(f"{THOUGHT}{CALL}", "It is sunny.")
    result = agent.run_sync(ASKS)
    assert result.output == "It is sunny."
    assert "sunny in Rome" in str(result.all_messages())
    structured = own.Agent(
        kind(NAME, provider=provider), output_type=own.NativeOutput(Place), retries=0
    )
    server.says(ROME)
    assert structured.run_sync(ASKS).output.city == "Rome"


@needs("instructor")
@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
def test_instructor(server, mode):
    instructor = import_module("instructor")
    from openai import OpenAI

    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as openai:
        client = instructor.from_openai(openai, mode=getattr(instructor.Mode, mode))
        call = CALL.replace("look", "Place") if mode == "TOOLS" else ROME.replace(": ", ":")
        server.says(call)
        fields = {"model": NAME, "messages": [{"role": "user", "content": ASKS}]}
        found = client.chat.completions.create(response_model=Place, max_retries=0, **fields)
        assert found.city == "Rome"


@needs("litellm")
@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "anthropic"])
def test_litellm(server, provider):
    litellm = import_module("litellm")
    litellm.telemetry = False
    base = server.url if provider == "anthropic" else f"{server.url}/v1"
    parameters = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    fields = {
        "model": f"{provider}/{NAME}", "api_base": base, "api_key": "none", "max_tokens": 200,
        "messages": [{"role": "user", "content": ASKS}], "num_retries": 0,
    }  # fmt: skip
    server.says(f"{THOUGHT}42")
    message = litellm.completion(**fields).choices[0].message
    assert message.content == "42" and message.reasoning_content == "I look."
    server.says("42 and more")
    chunks = litellm.completion(**fields, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == "42 and more"
    server.says(CALL)
    choice = litellm.completion(**fields, tools=[tool]).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert json.loads(choice.message.tool_calls[0].function.arguments) == {"city": "Rome"}


has_ai_sdk = shutil.which("node") is not None and (AI_SDK / "node_modules" / "ai").is_dir()


@pytest.mark.skipif(not has_ai_sdk, reason="needs Node.js, and npm install in tests/server/ai_sdk")
@pytest.mark.parametrize("kind", ["compatible", "chat", "responses"])
def test_ai_sdk(server, kind):
    thinks = "" if kind == "chat" else THOUGHT  # OpenAI's chats have no thoughts
    server.says(f"{thinks}42 and more", CALL, "It is sunny.", CALL, "It is sunny.", "Rain.", ROME)
    command = ["node", str(AI_SDK / "client.mjs"), server.url, kind]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert (found["answer"]["text"], found["answer"]["reason"]) == ("42 and more", "stop")
    assert found["answer"]["reasoning"].strip() == ("I look." if kind == "compatible" else "")
    assert found["called"] == {"text": "It is sunny.", "results": ["sunny in Rome"]}
    assert (found["tools"]["text"], found["tools"]["results"]) == (
        "It is sunny.", ["sunny in Rome"])  # fmt: skip
    assert found["answer"]["outputTokens"] > 3 and found["object"] == {"city": "Rome"}
    assert found["again"] == "Rain."


def again(server, says, call, *given):
    server.says(says)
    return call(*given)
