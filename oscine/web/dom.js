// Elements by hand. Text always goes in as text: no string from a model, a user or the server is ever read as HTML.

const SVG = "http://www.w3.org/2000/svg";

const ICONS = {
  plus: "M12 5v14M5 12h14",
  panel: "M4 5h16v14H4zM10 5v14",
  sliders: "M4 7h9M17 7h3M4 17h3M11 17h9M13 7a2 2 0 1 0 4 0a2 2 0 1 0-4 0M7 17a2 2 0 1 0 4 0a2 2 0 1 0-4 0",
  code: "M8 7l-5 5 5 5M16 7l5 5-5 5M13.5 5l-3 14",
  send: "M12 19V5M6 11l6-6 6 6",
  stop: "M7 7h10v10H7z",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  check: "M5 12.5l5 5 9-11",
  edit: "M4 20l1-5L16 4l4 4L9 19zM14 6l4 4",
  again: "M20 11a8 8 0 1 0-2 6M20 5v6h-6",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  close: "M6 6l12 12M18 6L6 18",
  keyboard: "M3 7h18v10H3zM7 11h.01M11 11h.01M15 11h.01M8 14h8",
  sun: "M12 8a4 4 0 1 0 0 8a4 4 0 1 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M19 5l-1.4 1.4M6.4 17.6L5 19",
  moon: "M19 14.5A8 8 0 0 1 9.5 5 8 8 0 1 0 19 14.5z",
  contrast: "M12 4a8 8 0 1 0 0 16a8 8 0 1 0 0-16M12 4v16M12 8h6M12 12h8M12 16h6",
  down: "M12 5v14M6 13l6 6 6-6",
  chevron: "M9 6l6 6-6 6",
  tool: "M9 4c-4 0-1 8-5 8c4 0 1 8 5 8M15 4c4 0 1 8 5 8c-4 0-1 8-5 8",
  warning: "M12 4l9 16H3zM12 10v4M12 17h.01",
};

/** h("button", {class: "quiet", onclick: f, "aria-label": "Close"}, child, "text", ...) */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked") element[name] = value;
    else element.setAttribute(name === "class" ? "class" : name, value === true ? "" : value);
  }
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  if (name === "stop") svg.classList.add("filled");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

/** A button that shows an icon alone; its label is read aloud and shown as its tooltip. */
export function iconButton(name, label, onclick, props = {}) {
  return h("button", { type: "button", class: "icon-button", "aria-label": label, title: label, onclick, ...props }, icon(name));
}

export const byId = (id) => document.getElementById(id);

let toastTimer = 0;

/** Says something in passing; `action` is a {label, run} that the person may still choose. */
export function toast(text, action) {
  const place = byId("toast");
  const hide = () => place.replaceChildren();
  clearTimeout(toastTimer);
  const button = action && h("button", { type: "button", onclick: () => { hide(); action.run(); } }, action.label);
  place.replaceChildren(h("p", {}, text, button));
  toastTimer = setTimeout(hide, action ? 8000 : 3000);
}

export async function copyText(text, what) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    copyBySelection(text); // pages without TLS have no clipboard of their own
  }
  toast(`Copied ${what}`);
}

function copyBySelection(text) {
  const area = h("textarea", { class: "visually-hidden", "aria-hidden": "true", value: text });
  const focused = document.activeElement;
  (focused?.closest("dialog") ?? document.body).append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  focused?.focus();
}

/** A textarea as high as its text, up to the limit that its style sets, where a browser does not do so by itself. */
export function fitHeight(area) {
  if (CSS.supports("field-sizing", "content") || !area.scrollHeight) return;
  area.style.height = "auto";
  area.style.height = `${area.scrollHeight + 2}px`;
}
