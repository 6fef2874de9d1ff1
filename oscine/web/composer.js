// The box at the foot of the page: the message, the button that sends or stops, and what is switched on.

import { COMMAND } from "./dialogs.js";
import { byId, fitHeight, h, icon } from "./dom.js";
import { goToSetting } from "./panels.js";
import { toolName } from "./responses.js";

const TOUCH = matchMedia("(pointer: coarse)");

export class Composer {
  /** `actions` has send(), stop() and rewriteLast(). */
  constructor(actions) {
    this.prompt = byId("prompt");
    this.button = byId("send");
    this.actions = actions;
    this.busy = false;
    byId("send-hint").textContent = `${COMMAND} ↵`;
    this.prompt.addEventListener("input", () => this.#changed());
    this.prompt.addEventListener("keydown", (event) => this.#key(event));
    byId("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.busy ? actions.stop() : actions.send();
    });
    this.setBusy(false);
  }

  get text() {
    return this.prompt.value;
  }

  set text(value) {
    this.prompt.value = value;
    this.#changed();
  }

  focus() {
    if (!TOUCH.matches) this.prompt.focus(); // there it would bring up the keyboard
  }

  setBusy(busy) {
    this.busy = busy;
    this.button.replaceChildren(icon(busy ? "stop" : "send"));
    this.button.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.button.title = busy ? "Stop (Escape)" : `Send (${COMMAND} + Enter)`;
    this.#changed();
  }

  showProblem(text) {
    byId("problem").textContent = text;
    byId("problem").hidden = !text;
  }

  /** What of the settings changes the answer to the next message. */
  showSettings({ tools, builtin, format, instructions }) {
    const functions = tools.filter((tool) => tool.on).length;
    const chips = [
      functions && [`${functions} ${functions === 1 ? "function" : "functions"}`, "tool-0"],
      builtin.length && [builtin.map(toolName).join(", "), "builtin"],
      format !== "text" && [format === "json_schema" ? "JSON schema" : "JSON", format === "json_schema" ? "schema" : "format"],
      instructions.trim() && ["instructions", "instructions"],
    ];
    const made = chips.filter(Boolean).map(([label, field]) =>
      h("button", { type: "button", class: "chip", title: "Show in the settings", onclick: () => goToSetting(field) }, label),
    );
    byId("chips").replaceChildren(...made);
  }

  #changed() {
    fitHeight(this.prompt);
    this.button.setAttribute("aria-disabled", String(!this.busy && !this.text.trim()));
  }

  #key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !TOUCH.matches) {
      event.preventDefault();
      if (!this.busy) this.actions.send();
    }
    if (event.key === "ArrowUp" && !this.text) {
      event.preventDefault();
      this.actions.rewriteLast();
    }
  }
}
