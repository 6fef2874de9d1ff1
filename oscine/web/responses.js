// The Responses API, which alone has the server's own tools: bodies of requests, and what its events add to an answer.
// Knows no elements and no HTTP.

import { DEFAULTS, SettingError, clientTools, leading, namedSchema, numbers, saysSomething } from "./request.js";

const INCLUDE = ["code_interpreter_call.outputs", "web_search_call.action.sources"];

/** The body without its input, as it is kept with an answer. Throws SettingError. */
export function responseParameters(settings) {
  if (settings.stop !== DEFAULTS.stop) throw new SettingError("stop", "Stop texts do not go with the server's tools.");
  const { functions, choice } = clientTools(settings);
  const { max_completion_tokens: limit, ...sampling } = numbers(settings);
  return {
    model: settings.model || undefined,
    input: [],
    stream: true,
    store: false,
    include: INCLUDE,
    reasoning: { effort: settings.effort },
    tools: [...functions.map((made) => ({ type: "function", ...made })), ...settings.builtin],
    tool_choice: typeof choice === "string" ? choice : { type: "function", name: choice.function.name },
    ...formatParameters(settings),
    ...sampling,
    ...(limit !== undefined && { max_output_tokens: limit }),
  };
}

function formatParameters({ format, schema }) {
  if (format === "text") return {};
  return { text: { format: format === "json_object" ? { type: format } : { type: format, ...namedSchema(schema) } } };
}

export function inputItems(messages, lead) {
  return [...leading(lead), ...messages.filter(saysSomething).flatMap(itemsOf)];
}

function itemsOf({ role, content, items, tool_calls: calls, tool_call_id: id }) {
  if (role === "tool") return [{ type: "function_call_output", call_id: id, output: content }];
  if (role === "user") return [{ role, content }];
  if (items) return items.filter((item) => item && item.status !== "in_progress");
  const made = calls.map(({ id: call_id, function: called }) => ({ type: "function_call", call_id, ...called }));
  return [...(content ? [{ role, content }] : []), ...made];
}

/** Adds an event that arrived `ms` after the request was sent. */
export function addEvent(answer, event, ms) {
  const items = (answer.items ??= []);
  const item = items[event.output_index];
  switch (event.type) {
    case "response.output_item.added":
      return begin(answer, event, ms);
    case "response.reasoning_text.delta":
      answer.reasoning += event.delta;
      return tick(answer, ms);
    case "response.output_text.delta":
      answer.content += event.delta;
      answer.stats.thoughtMs ??= ms;
      return tick(answer, ms);
    case "response.code_interpreter_call_code.delta":
      item.code += event.delta;
      return tick(answer, ms);
    case "response.mcp_call_arguments.delta":
      item.arguments += event.delta;
      return tick(answer, ms);
    case "response.function_call_arguments.delta":
      answer.tool_calls.at(-1).function.arguments += event.delta;
      return tick(answer, ms);
    case "response.output_item.done":
      items[event.output_index] = event.item;
      return undefined;
    case "response.completed":
    case "response.incomplete":
      return end(answer, event.response);
  }
}

const PARAGRAPH = "\n\n";

function begin(answer, { item, output_index: at }, ms) {
  answer.items[at] = { ...item };
  if (item.type === "reasoning" && answer.reasoning) answer.reasoning += PARAGRAPH;
  if (item.type === "message" && answer.content) answer.content += PARAGRAPH;
  if (item.type !== "function_call") return;
  answer.stats.thoughtMs ??= ms;
  answer.tool_calls.push({ id: item.call_id, type: "function", function: { name: item.name, arguments: "" } });
}

function tick({ stats }, ms) {
  stats.firstMs ??= ms;
  if (stats.lastMs === undefined) stats.beganMs = ms;
  stats.lastMs = ms;
}

function end(answer, { usage, incomplete_details: cut }) {
  if (usage) {
    answer.stats.usage = {
      prompt_tokens: usage.input_tokens,
      completion_tokens: usage.output_tokens,
      prompt_tokens_details: usage.input_tokens_details,
      completion_tokens_details: usage.output_tokens_details,
    };
  }
  answer.stats.finish = cut?.reason === "max_output_tokens" ? "length" : "stop";
  // The time of tools lies between the tokens, so they give no rate.
  if (serverCalls(answer).length) delete answer.stats.beganMs;
}

const SERVER_CALLS = ["code_interpreter_call", "web_search_call", "mcp_call"];

/** The items of an answer that are calls of the server's tools. */
export const serverCalls = ({ items = [] }) => items.filter((item) => SERVER_CALLS.includes(item?.type));

const TOOL_NAMES = { code_interpreter: "Python", web_search: "Browser" };

export const toolName = (tool) => TOOL_NAMES[tool.type] ?? tool.server_label;
