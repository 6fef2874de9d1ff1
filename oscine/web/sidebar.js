// The list of kept conversations.

import { byId, h, iconButton } from "./dom.js";
import { titleOf } from "./store.js";

/** `actions` has open(conversation) and remove(conversation). */
export function showConversations(conversations, currentId, actions) {
  byId("conversations").replaceChildren(...conversations.map((kept) => item(kept, kept.id === currentId, actions)));
}

function item(conversation, current, actions) {
  const title = titleOf(conversation);
  return h(
    "li",
    { class: current ? "current" : null },
    h("button", { type: "button", class: "open", "aria-current": current ? "true" : null, onclick: () => actions.open(conversation) }, title),
    iconButton("trash", `Delete "${title}"`, () => actions.remove(conversation)),
  );
}
