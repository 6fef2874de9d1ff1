// The dialogs: a request as code, and the keyboard.

import { apiUrl } from "./api.js";
import { isResponse } from "./body.js";
import { byId, copyText, h } from "./dom.js";
import { pretty } from "./json.js";
import { asCurl, asPython } from "./snippets.js";
import { apiKey } from "./store.js";

const MAC = /Mac|iPhone|iPad/.test(navigator.platform);
export const COMMAND = MAC ? "⌘" : "Ctrl";

const KEYS = [
  ["Enter", "send; Shift + Enter starts a new line"],
  [`${COMMAND} + Enter`, "send or continue, from any box"],
  ["Escape", "stop the answer, close what is open"],
  ["↑", "in the empty message box: rewrite the last question"],
  [`${COMMAND} + K`, "new conversation"],
  [`${COMMAND} + Shift + Enter`, "answer again"],
  [`${COMMAND} + ,`, "settings"],
  [`${COMMAND} + .`, "request as code"],
  [`${COMMAND} + /`, "this list"],
];

export function setUpDialogs() {
  byId("key-list").replaceChildren(
    ...KEYS.map(([keys, what]) => h("div", {}, h("dt", {}, keys.split(" + ").flatMap((key, i) => [i > 0 && " + ", h("kbd", {}, key)])), h("dd", {}, what))),
  );
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.addEventListener("click", (event) => {
      if (event.target === dialog || event.target.closest("[data-close]")) dialog.close();
    });
  }
}

export const showKeys = () => byId("keys").showModal();

/** `body` is sent as it is shown. */
export function showRequest(body) {
  const languages = byId("language");
  const show = () => {
    byId("snippet").textContent = snippet(languages.querySelector(":checked").value, body);
    byId("snippet-note").textContent = apiKey() ? "The key is read from OPENAI_API_KEY." : "";
  };
  languages.onchange = show;
  byId("copy-snippet").onclick = () => copyText(byId("snippet").textContent, "the request");
  show();
  byId("request").showModal();
}

function snippet(language, body) {
  const hasKey = Boolean(apiKey());
  if (language === "curl") return asCurl(body, apiUrl(isResponse(body) ? "responses" : "chat/completions"), hasKey);
  if (language === "Python") return asPython(body, apiUrl("").replace(/\/$/, ""), hasKey);
  return pretty(body);
}
