// The panel of settings: shows those of the current conversation and writes every change back to them.

import { byId, fitHeight, h, icon, iconButton } from "./dom.js";
import { pretty } from "./json.js";
import { parseTool } from "./request.js";
import { toolName } from "./responses.js";

const FIELDS = ["model", "role", "instructions", "schema", "temperature", "top_p", "max_tokens", "seed", "stop"];
const GROWING = ["instructions", "stop", "schema"];
const WIDTH = 34; // characters of a line of JSON that the panel has room for
const CHOICES = { effort: "effort", format: "format" };

export const TOOL_EXAMPLE = {
  name: "get_weather",
  description: "Get the current weather of a city.",
  parameters: {
    type: "object",
    properties: { city: { type: "string", description: "The city" } },
    required: ["city"],
    additionalProperties: false,
  },
};

export const SCHEMA_EXAMPLE = {
  type: "object",
  properties: { name: { type: "string" }, age: { type: "integer" }, city: { type: "string" } },
  required: ["name", "age", "city"],
  additionalProperties: false,
};

/** JSON for a box of this panel. */
export const narrow = (value) => pretty(value, WIDTH);

export class SettingsPanel {
  /** `changed()` is called after each change. */
  constructor(changed) {
    this.settings = null;
    this.onOffer = null; // the server's own tools, once it has named them
    this.changed = changed;
    for (const id of FIELDS) byId(id).addEventListener("input", (event) => this.#set(id, event.target.value));
    for (const [id, name] of Object.entries(CHOICES)) {
      byId(id).addEventListener("change", (event) => this.#set(name, event.target.value));
    }
    byId("tool-choice").addEventListener("change", (event) => this.#set("toolChoice", event.target.value));
    byId("add-tool").addEventListener("click", () => this.#addTool());
  }

  show(settings) {
    this.settings = settings;
    for (const id of FIELDS) byId(id).value = settings[id];
    for (const [id, name] of Object.entries(CHOICES)) {
      byId(id).querySelector(`[value="${settings[name]}"]`).checked = true;
    }
    this.#showBuiltin();
    this.#showTools();
    this.#showDependents();
  }

  /** The server has these tools of its own. */
  offer(tools) {
    this.onOffer = tools;
    this.#showBuiltin();
    this.#showToolChoice();
    this.changed();
  }

  #showBuiltin() {
    const { settings, onOffer } = this;
    if (!onOffer) return;
    const isOn = (tool) => settings.builtin.some((chosen) => toolName(chosen) === toolName(tool));
    settings.builtin = onOffer.filter(isOn); // another server may have had others
    const box = (tool) => {
      const input = h("input", { type: "checkbox", checked: isOn(tool), onchange: () => this.#switch(tool, input.checked) });
      return h("label", { class: "check" }, input, toolName(tool));
    };
    byId("builtin").replaceChildren(...onOffer.map(box));
    byId("builtin-field").hidden = !onOffer.length;
  }

  #switch(tool, on) {
    const others = this.settings.builtin.filter((chosen) => toolName(chosen) !== toolName(tool));
    this.settings.builtin = on ? [...others, tool] : others;
    this.#showToolChoice();
    this.changed();
  }

  /** Marks the input that a problem is about, and no other; boxes of JSON are marked while they cannot be read. */
  showProblem(field) {
    document.querySelectorAll("#settings input[aria-invalid]").forEach((input) => input.removeAttribute("aria-invalid"));
    if (field) byId(field)?.setAttribute("aria-invalid", "true");
  }

  #set(name, value) {
    this.settings[name] = value;
    if (name === "format" && value === "json_schema" && !this.settings.schema) {
      this.settings.schema = byId("schema").value = narrow(SCHEMA_EXAMPLE);
    }
    this.#showDependents();
    this.changed();
  }

  #showDependents() {
    byId("schema-field").hidden = this.settings.format !== "json_schema";
    showJsonProblem(byId("schema"), byId("schema-problem"), this.settings.schema, JSON.parse);
    GROWING.forEach((id) => fitHeight(byId(id)));
  }

  #addTool() {
    const taken = new Set(this.#names());
    const name = taken.has(TOOL_EXAMPLE.name) ? `function_${this.settings.tools.length + 1}` : TOOL_EXAMPLE.name;
    this.settings.tools.push({ on: true, text: narrow({ ...TOOL_EXAMPLE, name }) });
    this.#showTools();
    byId(`tool-${this.settings.tools.length - 1}`).focus();
    this.changed();
  }

  #names() {
    return this.settings.tools.filter((tool) => tool.on).map((tool) => nameOf(tool.text)).filter(Boolean);
  }

  #showTools() {
    byId("tools").replaceChildren(...this.settings.tools.map((tool, i) => this.#toolCard(tool, i)));
    byId("tools-hint").hidden = this.settings.tools.length > 0;
    byId("tools").querySelectorAll("textarea").forEach(fitHeight);
    this.#showToolChoice();
  }

  #toolCard(tool, i) {
    const title = h("span", {}, nameOf(tool.text) ?? `Function ${i + 1}`);
    const problem = h("p", { class: "problem", id: `tool-${i}-problem`, hidden: true });
    const area = h("textarea", { id: `tool-${i}`, class: "mono", spellcheck: "false", "aria-label": `Definition of function ${i + 1}`, value: tool.text });
    area.addEventListener("input", () => {
      tool.text = area.value;
      fitHeight(area);
      title.textContent = nameOf(tool.text) ?? `Function ${i + 1}`;
      this.#toolChanged(area, problem, tool);
    });
    const on = h("input", { type: "checkbox", checked: tool.on, onchange: () => { tool.on = on.checked; this.#toolChanged(area, problem, tool); } });
    const remove = iconButton("trash", "Remove this function", () => {
      this.settings.tools.splice(i, 1);
      this.#showTools();
      byId("add-tool").focus();
      this.changed();
    });
    showJsonProblem(area, problem, tool.text, parseTool);
    const edit = h("details", {}, h("summary", {}, icon("chevron"), "Definition"), area, problem);
    edit.open = true;
    return h("div", { class: "tool" }, h("div", { class: "row" }, h("label", { class: "check" }, on, title), remove), edit);
  }

  #toolChanged(area, problem, tool) {
    showJsonProblem(area, problem, tool.text, parseTool);
    this.#showToolChoice();
    this.changed();
  }

  #showToolChoice() {
    const select = byId("tool-choice");
    const names = this.#names();
    const options = [["auto", "when it helps"], ["none", "never"], ["required", "always one"], ...names.map((name) => [`function:${name}`, `always ${name}`])];
    if (!options.some(([value]) => value === this.settings.toolChoice)) this.settings.toolChoice = "auto";
    select.replaceChildren(...options.map(([value, label]) => h("option", { value }, label)));
    select.value = this.settings.toolChoice;
    select.hidden = !names.length && !this.settings.builtin.length;
  }
}

function nameOf(text) {
  try {
    return parseTool(text).name;
  } catch {
    return null;
  }
}

function showJsonProblem(area, place, text, parse) {
  let problem = "";
  try {
    parse(text);
  } catch (error) {
    problem = error.message;
  }
  place.textContent = problem;
  place.hidden = !problem;
  if (problem) area.setAttribute("aria-invalid", "true");
  else area.removeAttribute("aria-invalid");
}
