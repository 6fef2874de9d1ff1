// Conversations and preferences in the browser's own storage: one entry a conversation, so that two tabs do not collide.

import { DEFAULTS } from "./request.js";

const PREFIX = "oscine.conversation.";
const KEY = "oscine.key";

export function newConversation(settings = DEFAULTS) {
  return { id: crypto.getRandomValues(new Uint32Array(3)).join("-"), updated: Date.now(), settings: structuredClone(settings), messages: [] };
}

/** All that are kept, the latest first. */
export function listConversations() {
  const kept = Object.keys(localStorage).filter((name) => name.startsWith(PREFIX)).map(read);
  return kept.filter(Boolean).sort((a, b) => b.updated - a.updated);
}

function read(name) {
  try {
    const kept = JSON.parse(localStorage.getItem(name));
    return { ...kept, settings: { ...DEFAULTS, ...kept.settings } };
  } catch {
    return null; // written by something else
  }
}

/** Returns whether there was room. One without messages is not kept. */
export function saveConversation(conversation) {
  if (!conversation.messages.length) return true;
  try {
    localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
    return true;
  } catch {
    return false;
  }
}

export const deleteConversation = (id) => localStorage.removeItem(PREFIX + id);

/** What the list calls it: the first question's first line. */
export function titleOf({ messages }) {
  const question = messages.find((message) => message.role === "user")?.content.trim() ?? "";
  return question.split("\n")[0].slice(0, 80) || "New conversation";
}

export const preference = (name, usual) => localStorage.getItem(`oscine.${name}`) ?? usual;

export function setPreference(name, value) {
  try {
    localStorage.setItem(`oscine.${name}`, value);
  } catch {
    // a full storage forgets how the page looked, no more
  }
}

// The key stays with its tab and is forgotten with it.
export const apiKey = () => sessionStorage.getItem(KEY) ?? "";
export const setApiKey = (key) => sessionStorage.setItem(KEY, key);
