// The two panels: beside the conversation where there is room, over it where there is not.

import { byId } from "./dom.js";
import { preference, setPreference } from "./store.js";

const PANELS = {
  sidebar: { button: "toggle-sidebar", room: matchMedia("(min-width: 900px)") },
  settings: { button: "toggle-settings", room: matchMedia("(min-width: 1200px)") },
};

export function setUpPanels() {
  for (const [id, { button, room }] of Object.entries(PANELS)) {
    const fit = () => show(id, room.matches && preference(id, "open") === "open");
    byId(button).addEventListener("click", () => togglePanel(id));
    room.addEventListener("change", fit);
    fit();
  }
  byId("shade").addEventListener("click", closeOverlays);
  byId("close-settings").addEventListener("click", () => togglePanel("settings"));
}

const isOpen = (id) => !byId(id).inert;

function show(id, open) {
  const { button, room } = PANELS[id];
  byId(id).inert = !open;
  byId(id).classList.toggle("over", open && !room.matches);
  byId(button).setAttribute("aria-expanded", String(open));
  const over = Object.keys(PANELS).some((name) => byId(name).classList.contains("over"));
  byId("page").inert = over;
  byId("shade").hidden = !over;
}

export function togglePanel(id) {
  const open = !isOpen(id);
  show(id, open);
  if (PANELS[id].room.matches) setPreference(id, open ? "open" : "closed");
  if (open) focusFirst(id);
  else byId(PANELS[id].button).focus();
}

function focusFirst(id) {
  byId(id).querySelector("select, input, textarea, button:not([data-icon=close])").focus();
}

/** Opens the settings, if need be, and goes to one of them. */
export function goToSetting(id) {
  if (!isOpen("settings")) show("settings", true);
  const control = byId(id) ?? byId("settings");
  control.closest("details")?.setAttribute("open", "");
  control.focus();
  control.scrollIntoView({ block: "center" });
}

/** Returns whether there was one to close. */
export function closeOverlays() {
  const over = Object.keys(PANELS).filter((id) => byId(id).classList.contains("over"));
  over.forEach((id) => show(id, false));
  if (over.length) byId(PANELS[over[0]].button).focus();
  return over.length > 0;
}
