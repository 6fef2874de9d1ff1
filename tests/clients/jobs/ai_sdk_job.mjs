// The AI SDK works on a task: node ai_sdk_job.mjs BASE_URL THRESHOLD TASK, and goes on when run again.
// The conversation is kept in session.json of the current folder; the server compacts it from THRESHOLD tokens on.
import { createOpenAI } from "@ai-sdk/openai";
import { isStepCount, streamText, tool } from "ai";
import { execSync } from "node:child_process";
import { existsSync, readFileSync, writeFileSync } from "node:fs";
import { z } from "zod";

globalThis.AI_SDK_LOG_WARNINGS = false; // they go to stdout
const [baseURL, threshold, task] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const text = (names) => z.object(Object.fromEntries(names.map((name) => [name, z.string()])));
const tools = {
  run: tool({
    description: "Runs a command in a shell.",
    inputSchema: text(["command"]),
    execute: async ({ command }) => execSync(command).toString(),
  }),
  write: tool({
    description: "Writes a file.",
    inputSchema: text(["path", "content"]),
    execute: async ({ path, content }) => (writeFileSync(path, content), "written"),
  }),
  edit: tool({
    description: "Replaces a text in a file.",
    inputSchema: text(["path", "old", "new"]),
    execute: async (of) => (writeFileSync(of.path, readFileSync(of.path, "utf8").replace(of.old, of.new)), "edited"),
  }),
  look: tool({
    description: "Shows a picture.",
    inputSchema: text(["path"]),
    execute: async ({ path }) => readFileSync(path).toString("base64"),
    toModelOutput: ({ output }) => ({
      type: "content",
      value: [{ type: "file", mediaType: "image/png", data: { type: "data", data: output } }],
    }),
  }),
  weather: tool({
    description: "Says the weather of a place.",
    inputSchema: text(["place"]),
    execute: async () => "sunny",
    providerOptions: { openai: { deferLoading: true } },
  }),
  tool_search: openai.tools.toolSearch({
    execution: "client",
    description: "Searches for tools.",
    parameters: { type: "object", properties: { query: { type: "string" } }, required: ["query"] },
    execute: async () => ({
      tools: [
        {
          type: "function",
          name: "weather",
          description: "Says the weather of a place.",
          deferLoading: true,
          parameters: { type: "object", properties: { place: { type: "string" } }, required: ["place"] },
        },
      ],
    }),
  }),
};
const said = existsSync("session.json") ? JSON.parse(readFileSync("session.json")) : [];
const messages = [...said, { role: "user", content: task }];
const contextManagement = [{ type: "compaction", compactThreshold: Number(threshold) }];
const answer = streamText({
  model: openai.responses("oscine-nano"),
  instructions: "You mend programs.",
  messages,
  tools,
  providerOptions: { openai: { store: false, forceReasoning: true, contextManagement } },
  stopWhen: isStepCount(50),
  maxRetries: 0,
});
for await (const part of answer.fullStream) if (part.type === "error") throw part.error;
const made = await answer.responseMessages;
writeFileSync("session.json", JSON.stringify([...messages, ...made]));
console.log(await answer.text);
