// The calls of an answer: their arguments, and boxes in which a person plays the functions.

import { fitHeight, h, icon } from "./dom.js";
import { indented, isJson } from "./json.js";
import { codeFigure } from "./markdown.js";

/** Elements for the calls of `message`; `results` are the tool messages that answered them. */
export function callsView(message, results, live, actions) {
  const cards = message.tool_calls.map((call) => card(call, results.find((result) => result.tool_call_id === call.id)));
  return live || !cards.length || results.length ? cards : [form(message, cards, actions)];
}

function card(call, result) {
  const { name, arguments: given } = call.function;
  return h(
    "section",
    { class: "call", "aria-label": `Call of ${name}` },
    h("p", { class: "call-head" }, icon("tool"), h("span", {}, "Calls "), h("code", {}, name)),
    isJson(given) ? codeFigure(indented(given), "arguments", "json") : codeFigure(given, "arguments, not valid JSON"),
    result && codeFigure(indented(result.content), "result", isJson(result.content) ? "json" : ""),
  );
}

function form(message, cards, actions) {
  const boxes = message.tool_calls.map((call, i) => resultBox(call, message.drafts?.[i] ?? ""));
  boxes.forEach((box, i) => {
    cards[i].append(h("label", { class: "field" }, `Result of ${message.tool_calls[i].function.name}`, box));
  });
  const send = (event) => {
    event.preventDefault();
    actions.answerCalls(message, boxes.map((box) => box.value));
  };
  const button = h("button", { type: "submit", class: "primary" }, "Continue");
  const made = h("form", { class: "results", onsubmit: send }, cards, button);
  made.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) send(event);
  });
  return made;
}

function resultBox(call, draft) {
  const box = h("textarea", {
    class: "mono",
    rows: 2,
    spellcheck: "false",
    placeholder: "What the function returns, as text or JSON",
    "data-call": call.id,
    value: draft,
    oninput: () => fitHeight(box),
  });
  return box;
}
