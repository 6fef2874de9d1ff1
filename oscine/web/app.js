// The playground: one conversation at a time with the server that served this page.

import { addChunk, newAnswer } from "./answer.js";
import { ApiError, listModels, listTools, streamChat, streamResponse } from "./api.js";
import { isResponse, parameters, withConversation } from "./body.js";
import { Composer } from "./composer.js";
import { COMMAND, setUpDialogs, showKeys, showRequest } from "./dialogs.js";
import { byId, h, icon, toast } from "./dom.js";
import { EXAMPLES } from "./examples.js";
import { closeOverlays, goToSetting, setUpPanels, togglePanel } from "./panels.js";
import { SettingError } from "./request.js";
import { addEvent } from "./responses.js";
import { Scroller } from "./scroller.js";
import { SettingsPanel } from "./settings.js";
import { showConversations } from "./sidebar.js";
import * as store from "./store.js";
import { AnswerView, questionView } from "./turns.js";

const THEMES = { system: "contrast", light: "sun", dark: "moon" };

class Playground {
  constructor() {
    this.running = null; // of the answer that arrives: its AbortController
    this.views = new Map(); // message -> element
    this.scroller = new Scroller(byId("scroll"), byId("to-end"));
    this.panel = new SettingsPanel(() => this.#settingsChanged());
    this.composer = new Composer({ send: () => this.send(), stop: () => this.stop(), rewriteLast: () => this.#rewriteLast() });
    this.actions = {
      resend: (message, text) => this.#askFrom(message, { role: "user", content: text }),
      again: (message) => this.#askFrom(message),
      answerCalls: (message, results) => this.#answerCalls(message, results),
      changeResults: (message) => this.#changeResults(message),
      showRequest: (message) => showRequest(withConversation(message.sent, this.#before(message), message.lead)),
      goOn: () => this.#ask([...this.messages, { role: "user", content: "Go on where you stopped." }]),
      changeLimit: () => goToSetting("max_tokens"),
      enterKey: () => goToSetting("key"),
    };
    this.open(store.listConversations()[0] ?? store.newConversation());
  }

  get messages() {
    return this.conversation.messages;
  }

  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.panel.show(conversation.settings);
    this.#settingsChanged();
    this.#showAll();
    this.scroller.toEnd();
    showModels(conversation.settings, this.models);
  }

  startNew() {
    this.open(store.newConversation(this.conversation.settings));
    this.composer.focus();
  }

  #remove(conversation) {
    if (conversation.id === this.conversation.id) this.stop();
    store.deleteConversation(conversation.id);
    if (conversation.id === this.conversation.id) this.open(store.listConversations()[0] ?? store.newConversation(conversation.settings));
    else this.#showList();
    const restore = () => { this.#save(conversation); this.open(conversation); };
    toast("Deleted", { label: "Undo", run: restore });
    this.composer.focus();
  }

  #save(conversation = this.conversation) {
    conversation.updated = Date.now();
    if (!store.saveConversation(conversation)) toast("The browser's storage is full: delete a conversation to keep this one");
    this.#showList();
  }

  #settingsChanged() {
    this.composer.showProblem("");
    this.panel.showProblem(null);
    this.composer.showSettings(this.conversation.settings);
    store.saveConversation(this.conversation);
  }

  #showList() {
    const actions = { open: (kept) => { this.open(kept); closeOverlays(); }, remove: (kept) => this.#remove(kept) };
    showConversations(store.listConversations(), this.conversation.id, actions);
    const title = store.titleOf(this.conversation);
    byId("title").textContent = title;
    document.title = this.messages.length ? `${title} · Oscine` : "Oscine";
  }

  #showAll() {
    this.views.clear();
    byId("welcome").hidden = this.messages.length > 0;
    byId("log").replaceChildren(...this.messages.map((message) => this.#view(message)).filter(Boolean));
    this.#showList();
  }

  #view(message) {
    if (message.role === "tool") return null; // shown within the call
    const view = message.role === "user" ? { element: questionView(message, this.actions) } : this.#answerView(message);
    this.views.set(message, view);
    return view.element;
  }

  #answerView(message) {
    const following = this.messages.slice(this.messages.indexOf(message) + 1);
    const next = following.findIndex((other) => other.role !== "tool");
    const view = new AnswerView(message, following.slice(0, next < 0 ? undefined : next), this.actions);
    view.update(false);
    return view;
  }

  /** Sends what is in the message box, or the results of the calls that wait for them. */
  send() {
    if (this.running) return;
    const waiting = byId("log").querySelector("form.results");
    if (waiting) {
      const focused = waiting.contains(document.activeElement);
      if (focused) return waiting.requestSubmit();
      this.composer.showProblem("The model waits for the results of its calls: answer them first.");
      return waiting.querySelector("textarea").focus();
    }
    const text = this.composer.text;
    if (!text.trim()) return;
    if (this.#ask([...this.messages, { role: "user", content: text }])) this.composer.text = "";
  }

  stop() {
    this.running?.abort();
  }

  async answerAgain() {
    const last = this.messages.findLast((message) => message.role === "assistant");
    if (last && !this.running) this.#askFrom(last);
  }

  /** Goes back to where `message` stands, puts `instead` in its place, and asks again. */
  #askFrom(message, ...instead) {
    if (this.running) return;
    this.#ask([...this.messages.slice(0, this.messages.indexOf(message)), ...instead]);
  }

  #answerCalls(message, texts) {
    if (this.running) return;
    const results = message.tool_calls.map((call, i) => ({ role: "tool", tool_call_id: call.id, content: texts[i] }));
    this.#ask([...this.messages.slice(0, this.messages.indexOf(message) + 1), ...results]);
  }

  #changeResults(message) {
    if (this.running) return;
    const at = this.messages.indexOf(message) + 1;
    message.drafts = this.messages.slice(at, at + message.tool_calls.length).map((result) => result.content);
    this.conversation.messages = this.messages.slice(0, at);
    this.#showAll();
    byId("log").querySelector("form.results textarea").focus();
  }

  #rewriteLast() {
    const last = this.messages.findLast((message) => message.role === "user");
    if (last && !this.running) this.views.get(last).element.querySelector(".actions button").click();
  }

  #before(message) {
    return this.messages.slice(0, this.messages.indexOf(message));
  }

  /** Returns whether the request could be made; its answer arrives later. */
  #ask(messages) {
    const body = this.#body(messages);
    if (!body) return false;
    const { role, instructions } = this.conversation.settings;
    const answer = { ...newAnswer(parameters(this.conversation.settings)), lead: { role, instructions } };
    this.conversation.messages = [...messages, answer];
    this.#showAll();
    this.#save();
    this.#receive(body, answer, this.conversation);
    return true;
  }

  #body(messages) {
    try {
      return withConversation(parameters(this.conversation.settings), messages, this.conversation.settings);
    } catch (error) {
      if (!(error instanceof SettingError)) throw error;
      this.composer.showProblem(error.message);
      this.panel.showProblem(error.field);
      goToSetting(error.field);
      return null;
    }
  }

  async #receive(body, answer, conversation) {
    const running = (this.running = new AbortController());
    const view = this.views.get(answer);
    let frame = 0;
    const show = () => { frame = 0; view.update(true); this.scroller.follow(); };
    this.#setBusy(true);
    this.scroller.toEnd();
    show();
    const started = performance.now();
    try {
      const [stream, add] = isResponse(body) ? [streamResponse, addEvent] : [streamChat, addChunk];
      for await (const piece of stream(body, store.apiKey(), running.signal)) {
        add(answer, piece, performance.now() - started);
        frame ||= requestAnimationFrame(show);
      }
    } catch (error) {
      fail(answer, error);
    } finally {
      cancelAnimationFrame(frame);
      view.update(false);
      this.running = null;
      this.#setBusy(false);
      this.scroller.follow();
      this.#save(conversation);
      view.element.querySelector("form.results textarea")?.focus();
    }
  }

  #setBusy(busy) {
    this.composer.setBusy(busy);
    byId("log").setAttribute("aria-busy", String(busy)); // a screen reader waits for the whole answer
  }

  /** The request that would be sent now; where nothing is typed, the newest answer's as it was sent. */
  showNextRequest() {
    const text = this.composer.text;
    const last = this.messages.findLast((message) => message.role === "assistant");
    if (last && !text.trim()) return this.actions.showRequest(last);
    const body = this.#body(text.trim() ? [...this.messages, { role: "user", content: text }] : this.messages);
    if (body) showRequest(body);
  }

  async loadModels() {
    const problem = byId("model-problem");
    problem.hidden = true;
    try {
      this.models = await listModels(store.apiKey());
      this.panel.offer(await listTools(store.apiKey()));
    } catch (error) {
      problem.textContent = error.message;
      problem.hidden = false;
    }
    showModels(this.conversation.settings, this.models);
  }

  useExample(example) {
    Object.assign(this.conversation.settings, structuredClone(example.settings));
    this.panel.show(this.conversation.settings);
    this.#settingsChanged();
    this.composer.text = example.question;
    this.send();
  }
}

function fail(answer, error) {
  answer.stats.finish = error.name === "AbortError" ? "stopped" : "error";
  if (error.name === "AbortError") return;
  if (!(error instanceof ApiError)) console.error(error);
  const { message, status, param, retryAfter } = error;
  answer.error = { message, status, param, retryAfter };
}

/** `models` is undefined until the server has named them. */
function showModels(settings, models = []) {
  const names = models.map((model) => model.id);
  if (!names.includes(settings.model)) settings.model = names[0] ?? settings.model;
  byId("model").replaceChildren(...names.map((name) => h("option", { value: name }, name)));
  byId("model").value = settings.model;
}

function setUpTheme() {
  const button = byId("theme");
  const show = (theme) => {
    document.documentElement.dataset.theme = theme;
    button.replaceChildren(icon(THEMES[theme]));
    button.title = `Theme: ${theme}`;
    button.setAttribute("aria-label", `Theme: ${theme}`);
  };
  button.addEventListener("click", () => {
    const themes = Object.keys(THEMES);
    const next = themes[(themes.indexOf(document.documentElement.dataset.theme) + 1) % themes.length];
    store.setPreference("theme", next);
    show(next);
  });
  show(store.preference("theme", "system"));
}

function setUpKeys(playground) {
  const withCommand = {
    k: () => playground.startNew(),
    ",": () => togglePanel("settings"),
    ".": () => playground.showNextRequest(),
    "/": () => showKeys(),
  };
  document.addEventListener("keydown", (event) => {
    if (document.querySelector("dialog[open]")) return;
    if (event.key === "Escape" && !closeOverlays()) playground.stop();
    if (!(event.ctrlKey || event.metaKey) || event.altKey) return;
    const run = event.key === "Enter" ? () => (event.shiftKey ? playground.answerAgain() : playground.send()) : withCommand[event.key.toLowerCase()];
    if (!run || event.defaultPrevented) return;
    event.preventDefault();
    run();
  });
}

function setUpExamples(playground) {
  const button = (example) =>
    h("button", { type: "button", onclick: () => playground.useExample(example) }, h("strong", {}, example.title), h("span", {}, example.question));
  byId("examples").replaceChildren(...EXAMPLES.map((example) => h("li", {}, button(example))));
}

function setUpKeyField(playground) {
  byId("key").value = store.apiKey();
  const use = () => {
    store.setApiKey(byId("key").value.trim());
    playground.loadModels();
  };
  byId("key").addEventListener("change", use);
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    use();
  });
}

for (const button of document.querySelectorAll("[data-icon]")) {
  button.prepend(icon(button.dataset.icon));
  button.title ||= button.getAttribute("aria-label") ?? "";
}
setUpTheme();
setUpDialogs();
setUpPanels();
const playground = new Playground();
setUpKeys(playground);
setUpExamples(playground);
setUpKeyField(playground);
byId("new").addEventListener("click", () => { playground.startNew(); closeOverlays(); });
byId("show-request").addEventListener("click", () => playground.showNextRequest());
byId("show-keys").addEventListener("click", showKeys);
byId("new").title = `${COMMAND} + K`;
playground.composer.focus();
playground.loadModels();
