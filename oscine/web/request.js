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
  builtin: [], // tools of the server that are switched on, as it names them
  toolChoice: "auto", // auto, none, required, or "function:NAME"
  format: "text",
  schema: "",
  temperature: "",
  top_p: "",
  max_tokens: "",
  seed: "",
  stop: "",
};

/** The body of a chat completion without its messages, as it is kept with an answer. Throws SettingError. */
export function chatParameters(settings) {
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

export function wireMessages(messages, lead) {
  return [...leading(lead), ...messages.filter(saysSomething).map(wireMessage)];
}

export const leading = ({ role, instructions }) => (instructions.trim() ? [{ role, content: instructions }] : []);

export const saysSomething = (message) => message.role !== "assistant" || message.content || message.tool_calls.length > 0;

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

/** The functions that are switched on, and the choice among all tools as chat completions have it. */
export function clientTools({ tools, toolChoice }) {
  const functions = tools.flatMap((tool, i) => (tool.on ? [readTool(tool.text, i)] : []));
  const name = toolChoice.startsWith("function:") && toolChoice.slice("function:".length);
  return { functions, choice: name ? { type: "function", function: { name } } : toolChoice };
}

function toolParameters(settings) {
  const { functions, choice } = clientTools(settings);
  if (!functions.length) return {};
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
  return { response_format: { type: format, json_schema: namedSchema(schema) } };
}

export function namedSchema(text) {
  try {
    return { name: "answer", schema: JSON.parse(text), strict: true };
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
  const stop = settings.stop.split("\n").filter((line) => line !== "");
  return { ...numbers(settings), ...(stop.length && { stop }) };
}

export function numbers(settings) {
  const given = NUMBERS.filter(([field]) => settings[field].trim() !== "");
  return Object.fromEntries(given.map(([field, name]) => [name, readNumber(field, settings[field])]));
}

function readNumber(field, text) {
  const value = Number(text);
  if (!Number.isFinite(value)) throw new SettingError(field, `"${text}" is not a number`);
  return value;
}
