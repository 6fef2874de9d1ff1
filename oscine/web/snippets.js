// A request as a command or a program that sends exactly it. The key is never written into either.

import { isResponse } from "./body.js";
import { pretty } from "./json.js";

/** For a POSIX shell. */
export function asCurl(body, url, hasKey) {
  const lines = [
    `curl -N ${quoted(url)}`,
    `-H 'Content-Type: application/json'`,
    ...(hasKey ? [`-H "Authorization: Bearer $OPENAI_API_KEY"`] : []),
    `-d ${quoted(pretty(body))}`,
  ];
  return lines.join(" \\\n  ");
}

const quoted = (text) => `'${text.replaceAll("'", `'\\''`)}'`;

/** With the openai package. */
export function asPython(body, baseUrl, hasKey) {
  const options = Object.entries(body).filter(([, value]) => value !== undefined);
  const lines = [
    "# pip install openai",
    ...(hasKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    `client = OpenAI(base_url=${literal(baseUrl)}, api_key=${hasKey ? 'os.environ["OPENAI_API_KEY"]' : '"none"'})`,
    `stream = client.${isResponse(body) ? "responses" : "chat.completions"}.create(`,
    ...options.map(([name, value]) => `    ${name}=${literal(value, "    ")},`),
    ")",
    ...(isResponse(body) ? PYTHON_EVENTS : PYTHON_CHUNKS),
    ...(body.tools && !isResponse(body) ? PYTHON_CALLS : []),
    "print()",
  ];
  return lines.join("\n");
}

const PYTHON_CHUNKS = [
  "for chunk in stream:",
  "    for choice in chunk.choices:",
  "        delta = choice.delta",
  '        print(getattr(delta, "reasoning", None) or delta.content or "", end="", flush=True)',
];

const PYTHON_EVENTS = [
  "for event in stream:",
  '    if event.type.endswith(".delta"):',
  '        print(event.delta, end="", flush=True)',
];

const PYTHON_CALLS = [
  "        for call in delta.tool_calls or []:",
  '            print(call.function.name or "", call.function.arguments or "", sep="", end="", flush=True)',
];

/** A JSON value as Python writes it; a JSON string is a Python string. */
function literal(value, indent = "") {
  if (value === null) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => literal(item, inner))
    : Object.entries(value).map(([key, item]) => `${JSON.stringify(key)}: ${literal(item, inner)}`);
  const flat = open + items.join(", ") + close;
  if (flat.length + indent.length < 90 && !flat.includes("\n")) return flat;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}
