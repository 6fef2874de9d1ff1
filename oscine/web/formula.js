// Formulas, set by KaTeX, which is fetched when the first one appears. What it cannot set is shown as it was written.

import { h } from "./dom.js";

const OPTIONS = { throwOnError: true, trust: false, strict: false, maxSize: 20, maxExpand: 500 };
const INLINE_LENGTH = 2000; // characters; longer ones are text
const TEX_SIGN = /[\\^_={}<>]/;
const WORD = /[\p{L}\p{N}]/u;

let setting = null; // the promise of a fetch of KaTeX
let katex = null;
let attempts = 0;

/** `written`: the source with its delimiters. */
export function formula(source, display, written) {
  const element = h("span", { class: display ? "formula display" : "formula" }, written);
  if (katex) set(element, source, display);
  else load().then(() => set(element, source, display), () => {});
  return element;
}

/** Fetches KaTeX once; after a failure the next formula fetches it again. */
function load() {
  setting ??= fetchKatex().catch((error) => {
    setting = null;
    throw error;
  });
  return setting;
}

async function fetchKatex() {
  const again = attempts ? `?attempt=${attempts}` : ""; // browsers cache the failure of a module
  attempts += 1;
  await import(`./vendor/katex.min.js${again}`);
  const link = h("link", { rel: "stylesheet", href: new URL(`vendor/katex.min.css${again}`, import.meta.url).href });
  await new Promise((resolve, reject) => {
    link.addEventListener("load", resolve);
    link.addEventListener("error", () => {
      link.remove();
      reject(new Error("no stylesheet"));
    });
    document.head.append(link);
  });
  katex = globalThis.katex;
}

function set(element, source, displayMode) {
  const made = h("span");
  try {
    katex.render(source, made, { ...OPTIONS, displayMode });
  } catch {
    return; // not TeX, or more than KaTeX knows
  }
  element.replaceChildren(...made.childNodes);
}

/** [element, how many characters it stands for] where a formula begins at `i`: \(, \[, $$ or $; else null. */
export function inlineFormula(text, i) {
  const [open, close] = [["\\(", "\\)"], ["\\[", "\\]"], ["$$", "$$"], ["$", "$"]].find(([mark]) => text.startsWith(mark, i)) ?? [];
  if (!open) return null;
  const rest = text.slice(i, i + INLINE_LENGTH);
  const end = open === "$" ? endOfDollars(rest, text[i - 1] ?? "") : rest.indexOf(close, open.length);
  const source = rest.slice(open.length, end);
  if (end < 0 || !source.trim()) return null;
  const length = end + close.length;
  return [formula(source, open === "\\[" || open === "$$", rest.slice(0, length)), length];
}

/** Where the formula ends that a single dollar begins, or -1: prices and variables of a shell are none. */
function endOfDollars(text, before) {
  if (WORD.test(before) || /\s/.test(text[1] ?? " ")) return -1;
  const end = text.search(/(?<=[^\\\s$])\$(?![\p{L}\p{N}$])/u);
  const source = text.slice(1, end);
  const isProse = /\p{L}{2}/u.test(source) && /\s/.test(source) && !TEX_SIGN.test(source);
  return end > 0 && !isProse && !/[\n`$]/.test(source) ? end : -1;
}

const OPENS = /^ {0,3}(\\\[|\$\$)/;
const MOST_LINES = 100;
const BLOCK_LENGTH = 10_000; // characters

/** [the end of a formula that takes whole lines from `start`, its source]; null if there is none. */
export function linesOfFormula(lines, start) {
  const open = lines[start].match(OPENS)?.[1];
  if (!open) return null;
  const close = open === "$$" ? "$$" : "\\]";
  let source = "";
  let rest = lines[start].slice(lines[start].indexOf(open) + open.length);
  for (let i = start; i < start + MOST_LINES && source.length < BLOCK_LENGTH; i += 1) {
    const at = rest.indexOf(close);
    if (at >= 0) {
      source += rest.slice(0, at);
      return source.trim() && /^[\s.,;:]*$/.test(rest.slice(at + 2)) ? [i + 1, source] : null;
    }
    if (i + 1 >= lines.length) return null;
    source += `${rest}\n`;
    rest = lines[i + 1];
  }
  return null;
}

/** The element for lines that linesOfFormula found. */
export function formulaBlock(source, written) {
  return h("div", { class: "formula-block", tabindex: "0", role: "region", "aria-label": "Formula" }, formula(source, true, written));
}
