// The calls that the server's own tools answered: what the model asked for, and what it got.

import { h, icon } from "./dom.js";
import { indented, isJson } from "./json.js";
import { codeFigure } from "./markdown.js";
import { serverCalls } from "./responses.js";

export const serverCallsView = (message) => serverCalls(message).map((item) => card(item, ...PARTS[item.type](item)));

function card({ status }, what, name, figures) {
  const state = { in_progress: "running", failed: "failed", incomplete: "cut off" }[status];
  const head = h("p", { class: "call-head" }, icon("tool"), h("span", {}, `${what} `), name && h("code", {}, name), state && h("span", { class: "quiet" }, ` ${state}`));
  return h("section", { class: "call server-call", "aria-label": `${what} ${name ?? ""}`.trim() }, head, figures.filter(Boolean));
}

const PARTS = {
  code_interpreter_call: ({ code, outputs }) => [
    "Runs Python",
    null,
    [code && codeFigure(code, "python"), ...(outputs ?? []).map(({ logs }) => logs && codeFigure(logs, "output", ""))],
  ],
  web_search_call: ({ action }) => {
    if (action.type === "open_page") return ["Opens", action.url ?? "a page", []];
    if (action.type === "find_in_page") return ["Looks for", action.pattern, [codeFigure(action.url, "page", "")]];
    const found = (action.sources ?? []).map(({ url }) => url).join("\n");
    return ["Searches for", action.query, [found && codeFigure(found, "found", "")]];
  },
  mcp_call: ({ server_label: label, name, arguments: given, output, error }) => [
    "Calls",
    `${label}.${name}`,
    [
      codeFigure(indented(given), "arguments", isJson(given) ? "json" : ""),
      output && codeFigure(indented(output), "result", isJson(output) ? "json" : ""),
      error && codeFigure(errorText(error), "error", ""),
    ],
  ],
};

const errorText = (error) => error.content?.map(({ text }) => text).join("\n") ?? String(error);
