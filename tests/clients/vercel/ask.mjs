// Asks the server at argv[2] (its base URL) over the API argv[3] (chat, responses), and prints what was seen as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they go to stdout
const [baseURL, api] = process.argv.slice(2);
const models = {
  chat: () => createOpenAICompatible({ name: "oscine", baseURL, includeUsage: true })("oscine-nano"),
  responses: () => createOpenAI({ baseURL, apiKey: "none" }).responses("oscine-nano"),
};
const options = {
  openai: { reasoningSummary: "auto", reasoningEffort: "medium", forceReasoning: true },
  oscine: { reasoningEffort: "medium" },
};
const cities = [];
const getWeather = tool({
  description: "Gets the current weather for a city.",
  inputSchema: z.object({ city: z.string() }),
  execute: async ({ city }) => {
    cities.push(city);
    return { temperature: 17, sky: "sunny" };
  },
});
const usual = { model: models[api](), providerOptions: options, temperature: 0, maxOutputTokens: 400, maxRetries: 0 };
const sum = { ...usual, prompt: "What is 2 + 3?" };
const weather = { ...usual, prompt: "What is the weather in Lisbon?", tools: { get_weather: getWeather } };

const answer = await generateText(sum);
const stream = streamText(sum);
const streamed = { text: "", reasoning: "" };
for await (const part of stream.fullStream) {
  if (part.type === "error") throw part.error;
  if (part.type === "text-delta") streamed.text += part.text;
  if (part.type === "reasoning-delta") streamed.reasoning += part.text;
}
const called = await generateText({ ...weather, stopWhen: stepCountIs(3) });
const stepped = streamText({ ...weather, stopWhen: stepCountIs(3) });
await stepped.consumeStream();
const seen = {
  text: answer.text,
  reasoning: answer.reasoningText,
  streamed,
  tokens: (await stream.usage).outputTokens,
  called: called.text,
  stepped: await stepped.text,
  cities,
};
console.log(JSON.stringify(seen));
