// The AI SDK's calls of a server, as JSON: node client.mjs URL compatible|chat|responses
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, jsonSchema, Output, stepCountIs, streamText, tool } from "ai";

const [url, kind] = process.argv.slice(2);
const baseURL = `${url}/v1`;
const openai = createOpenAI({ baseURL, apiKey: "none" });
const compatible = createOpenAICompatible({
  name: "gptmanager",
  baseURL,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const model = { compatible, chat: openai.chat, responses: openai.responses }[kind]("scripted");
const schema = jsonSchema({
  type: "object",
  properties: { city: { type: "string" } },
  required: ["city"],
  additionalProperties: false,
});
const look = tool({
  description: "Look at the weather of a city.",
  inputSchema: schema,
  execute: async ({ city }) => `sunny in ${city}`,
});
const asked = { model, prompt: "How is the weather in Rome?", maxRetries: 0 };
const withTool = { ...asked, tools: { look }, stopWhen: stepCountIs(2) };

async function streamed(options) {
  const found = { text: "", reasoning: "", results: [] };
  const stream = streamText({ ...options, onError: () => {} });
  for await (const part of stream.fullStream) {
    if (part.type === "error") throw part.error;
    if (part.type === "text-delta") found.text += part.text;
    if (part.type === "reasoning-delta") found.reasoning += part.text;
    if (part.type === "tool-result") found.results.push(part.output);
  }
  const usage = await stream.totalUsage;
  return { ...found, reason: await stream.finishReason, outputTokens: usage.outputTokens };
}

const answer = await streamed(asked);
const whole = await generateText(withTool);
const results = whole.steps.flatMap((step) => step.toolResults.map((one) => one.output));
const tools = await streamed(withTool);
const asks = (content) => ({ role: "user", content });
const messages = [asks(asked.prompt), ...whole.response.messages, asks("And now?")];
const again = await generateText({ model, messages, maxRetries: 0 });
const object = await generateText({ ...asked, output: Output.object({ schema }) });
const called = { text: whole.text, results };
console.log(JSON.stringify({ answer, called, tools, again: again.text, object: object.output }));
