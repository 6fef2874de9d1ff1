// From a conversation and its settings to the body of a request. Knows the API's names; no elements and no HTTP.

/** A setting that cannot be sent; `field` is the id of its control. */
export class SettingError extends Error {
  constructor(field, message) {
    super(message);
    this.field = field;
  }
}

export const DEFAULTS = {
  model: "",
  effort: "medium",
  role: "developer",
  instructions: "",
  tools: [], // of {text, on}
  toolChoice: "auto", // auto, none, required, or "function:NAME"
  format: "text",
  schema: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  stop: "",
};

/** Throws SettingError. `messages` are those of a conversation, the question last. */
export function requestBody(messages, settings) {
  return { ...parameters(settings), messages: wireMessages(messages, settings) };
}

/** The body without its messages, as it is kept with an answer. */
export function parameters(settings) {
  return {
    model: settings.model || undefined,
    messages: [], // keeps its place in the order in which a person reads a request
    stream: true,
    stream_options: { include_usage: true },
    reasoning_effort: settings.effort,
    ...toolParameters(settings),
    ...formatParameters(settings),
    ...samplingParameters(settings),
  };
}

export function wireMessages(messages, { role, instructions }) {
  const leading = instructions.trim() ? [{ role, content: instructions }] : [];
  return [...leading, ...messages.filter(saysSomething).map(wireMessage)];
}

const saysSomething = (message) => message.role !== "assistant" || message.content || message.tool_calls.length > 0;

function wireMessage({ role, content, reasoning, tool_calls: calls, tool_call_id: id }) {
  if (role === "tool") return { role, tool_call_id: id, content };
  if (role === "user") return { role, content };
  if (!calls.length) return { role, content };
  return { role, content: content || null, ...(reasoning && { reasoning }), tool_calls: calls };
}

/** {name, description, parameters} of a tool's text, which may be the function alone or wrapped as the API wraps it. */
export function parseTool(text) {
  const tool = JSON.parse(text);
  const made = tool?.type === "function" && tool.function ? tool.function : tool;
  if (typeof made?.name !== "string") throw new Error("a function needs a name");
  return made;
}

function toolParameters({ tools, toolChoice }) {
  const functions = tools.flatMap((tool, i) => (tool.on ? [readTool(tool.text, i)] : []));
  if (!functions.length) return {};
  const name = toolChoice.startsWith("function:") && toolChoice.slice("function:".length);
  const choice = name ? { type: "function", function: { name } } : toolChoice;
  return { tools: functions.map((made) => ({ type: "function", function: made })), tool_choice: choice };
}

function readTool(text, i) {
  try {
    return parseTool(text);
  } catch (error) {
    throw new SettingError(`tool-${i}`, `Tool ${i + 1} cannot be read: ${error.message}`);
  }
}

function formatParameters({ format, schema }) {
  if (format === "text") return {};
  if (format === "json_object") return { response_format: { type: format } };
  try {
    const parsed = JSON.parse(schema);
    return { response_format: { type: format, json_schema: { name: "answer", schema: parsed, strict: true } } };
  } catch (error) {
    throw new SettingError("schema", `The schema cannot be read: ${error.message}`);
  }
}

const NUMBERS = [
  ["temperature", "temperature"],
  ["top_p", "top_p"],
  ["max_tokens", "max_completion_tokens"],
  ["seed", "seed"],
];

function samplingParameters(settings) {
  const given = NUMBERS.filter(([field]) => settings[field].trim() !== "");
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  const numbers = given.map(([field, name]) => [name, readNumber(field, settings[field])]);
  return { ...Object.fromEntries(numbers), ...(stop.length && { stop }) };
}

function readNumber(field, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingError(field, `"${text}" is not a number`);
  return value;
}
