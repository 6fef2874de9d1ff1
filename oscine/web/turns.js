// The elements of a conversation's messages. Knows how they look, not what the buttons do: `actions` does.

import { duration, figures } from "./answer.js";
import { isJson, tokenLimit } from "./body.js";
import { callsView } from "./calls.js";
import { copyText, fitHeight, h, icon, iconButton } from "./dom.js";
import { indented } from "./json.js";
import { MarkdownView, codeFigure } from "./markdown.js";
import { serverCallsView } from "./server_calls.js";
import { preference, setPreference } from "./store.js";

/** What a person asked, and a form in its place while they rewrite it. */
export function questionView(message, actions) {
  const bubble = h("div", { class: "bubble" }, message.content);
  const buttons = h(
    "div",
    { class: "actions" },
    iconButton("edit", "Edit and send again", () => turn.replaceChildren(rewriting(message, actions, restore))),
    iconButton("copy", "Copy the question", () => copyText(message.content, "the question")),
  );
  const restore = () => {
    turn.replaceChildren(bubble, buttons);
    buttons.firstChild.focus();
  };
  const turn = h("article", { class: "turn user", "aria-label": "You" }, bubble, buttons);
  return turn;
}

function rewriting(message, actions, restore) {
  const area = h("textarea", { "aria-label": "Your message", value: message.content, oninput: () => fitHeight(area) });
  const send = () => area.value.trim() && actions.resend(message, area.value);
  const form = h(
    "form",
    { class: "rewrite", onsubmit: (event) => { event.preventDefault(); send(); } },
    area,
    h("button", { type: "button", onclick: restore }, "Cancel"),
    h("button", { type: "submit", class: "primary" }, "Send"),
  );
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") restore();
    if (event.key !== "Escape" && !(event.key === "Enter" && (event.ctrlKey || event.metaKey))) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Enter") send();
  });
  requestAnimationFrame(() => {
    fitHeight(area);
    area.focus();
  });
  return form;
}

/** An answer, complete or still growing: `update` shows what was added to its message. */
export class AnswerView {
  constructor(message, results, actions) {
    this.message = message;
    this.results = results; // the tool messages that follow, if any
    this.actions = actions;
    this.thought = h("div", { class: "thought" });
    this.summary = h("span");
    this.fold = h("details", { class: "thinking", hidden: true, open: preference("thinking", "open") === "open" });
    this.fold.append(h("summary", {}, icon("chevron"), this.summary), this.thought);
    this.summary.parentElement.addEventListener("click", () => setPreference("thinking", this.fold.open ? "closed" : "open"));
    this.serverCalls = h("div", { class: "calls" });
    this.text = h("div", { class: "markdown" });
    this.markdown = new MarkdownView(this.text);
    this.calls = h("div", { class: "calls" });
    this.foot = h("footer");
    this.element = h("article", { class: "turn assistant", "aria-label": "Answer" });
    this.element.append(this.fold, this.serverCalls, this.text, this.calls, this.foot);
  }

  /** `live`: more will come. */
  update(live) {
    const { content, reasoning, tool_calls: calls, stats } = this.message;
    this.element.classList.toggle("live", live && !content && !calls.length);
    this.fold.hidden = !reasoning;
    this.#grow(this.thought, reasoning);
    const took = stats.thoughtMs - stats.firstMs;
    this.summary.textContent = live && !stats.thoughtMs ? "Thinking" : `Thought${took >= 1 ? ` for ${duration(took)}` : ""}`;
    this.serverCalls.replaceChildren(...serverCallsView(this.message));
    this.#showText(content, live);
    if (!live || calls.length) this.calls.replaceChildren(...callsView(this.message, this.results, live, this.actions));
    this.foot.replaceChildren(...(live ? [] : this.#footer()));
  }

  /** Text that only grows is added to, so that a selection within it stays. */
  #grow(place, text) {
    if (text.startsWith(place.textContent)) place.append(text.slice(place.textContent.length));
    else place.textContent = text;
    place.normalize();
  }

  #showText(content, live) {
    if (!isJson(this.message.sent)) return this.markdown.show(content);
    return this.text.replaceChildren(...(content ? [codeFigure(live ? content : indented(content), "json")] : []));
  }

  #footer() {
    const { message, actions } = this;
    return [
      message.error && errorView(message.error, actions),
      message.stats.finish === "length" && cutView(message, actions),
      h("p", { class: "figures" }, figures(message).map((text) => h("span", {}, text))),
      h(
        "div",
        { class: "actions" },
        message.content && iconButton("copy", "Copy the answer", () => copyText(message.content, "the answer")),
        this.results.length > 0 && iconButton("edit", "Change the results", () => actions.changeResults(message)),
        iconButton("again", "Answer again", () => actions.again(message)),
        iconButton("code", "Request of this answer as code", () => actions.showRequest(message)),
      ),
    ].filter(Boolean);
  }
}

/** What may be done about an answer that was cut. Only the newest one can go on. */
function cutView({ sent, content }, actions) {
  const limit = tokenLimit(sent);
  const button = (label, run) => h("button", { type: "button", onclick: run }, label);
  return h(
    "div",
    { class: "cut" },
    h("p", {}, limit ? `The answer was cut off at the limit of ${limit} tokens.` : "The answer was cut off: the conversation fills the model's context."),
    limit && content && button("Go on", actions.goOn),
    limit && button("Change the limit", actions.changeLimit),
  );
}

function errorView({ message, status, param, retryAfter }, actions) {
  const details = [status && `status ${status}`, param && `parameter ${param}`, retryAfter && `retry after ${retryAfter} s`];
  const button = status === 401 && h("button", { type: "button", onclick: actions.enterKey }, "Enter the key");
  return h(
    "div",
    { class: "error", role: "alert" },
    icon("warning"),
    h("div", {}, h("p", {}, message), h("p", { class: "quiet" }, details.filter(Boolean).join(" · "))),
    button,
  );
}
