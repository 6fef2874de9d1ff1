// What stands within a line: code, formulas, emphasis, links, line breaks. One pass from left to right.

import { h } from "./dom.js";
import { inlineFormula } from "./formula.js";

const MAX_DEPTH = 6; // of emphasis within emphasis
const MAX_LENGTH = 20_000; // characters; a longer text is shown as it is
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const WORD = /[\p{L}\p{N}]/u;
const LINK = /^!?\[((?:[^\]\\]|\\.){0,1000})\]\(\s*<?([^\s<>()]*(?:\([^\s<>()]*\)[^\s<>()]*)*)>?(?:\s+"[^"]*")?\s*\)/;
const BARE = /^https?:\/\/[^\s<>"'`|]+/;
const EMPHASIS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "del"],
  ["*", "em"],
  ["_", "em"],
];

/** Nodes for a text. */
export function inline(text, depth = 0) {
  if (text.length > MAX_LENGTH || depth > MAX_DEPTH) return [text];
  const nodes = [];
  let plain = "";
  for (let i = 0; i < text.length; ) {
    const [node, length] = special(text, i, depth) ?? [null, 1];
    if (node === null) {
      plain += text[i];
    } else {
      if (plain) nodes.push(plain);
      plain = "";
      nodes.push(...[node].flat());
    }
    i += length;
  }
  return plain ? [...nodes, plain] : nodes;
}

/** [nodes, how many characters they stand for], or null where a character stands for itself. */
function special(text, i, depth) {
  switch (text[i]) {
    case "$":
      return inlineFormula(text, i);
    case "\\":
      return inlineFormula(text, i) ?? escaped(text, i);
    case "\n":
      return [h("br"), 1];
    case "`":
      return code(text, i);
    case "!":
    case "[":
      return link(text.slice(i, i + 3000), depth);
    case "<":
      return brokenLine(text, i);
    case "h":
      return bareLink(text, i);
    default:
      return "*_~".includes(text[i]) ? emphasis(text, i, depth) : null;
  }
}

const escaped = (text, i) => (PUNCTUATION.test(text[i + 1] ?? "") ? [text[i + 1], 2] : null);

/** `<br>` is the one tag that models write in tables. */
function brokenLine(text, i) {
  const tag = text.slice(i, i + 6).match(/^<br ?\/?>/);
  return tag && [h("br"), tag[0].length];
}

function code(text, i) {
  const mark = text.slice(i).match(/^`+/)[0];
  let end = text.indexOf(mark, i + mark.length);
  while (end >= 0 && text[end + mark.length] === "`") {
    end += text.slice(end).match(/^`+/)[0].length;
    end = text.indexOf(mark, end);
  }
  if (end < 0) return [mark, mark.length];
  const inner = text.slice(i + mark.length, end).replaceAll("\n", " ");
  return [h("code", {}, inner.replace(/^ (.*\S.*) $/, "$1")), end + mark.length - i];
}

function link(text, depth) {
  const match = text.match(LINK);
  if (!match || (text[0] === "!" && text[1] !== "[")) return null;
  const [all, label, address] = match;
  const shown = label ? inline(label, depth + 1) : [address];
  return [anchor(address, shown) ?? shown, all.length];
}

function bareLink(text, i) {
  if (i > 0 && WORD.test(text[i - 1])) return null;
  const match = text.slice(i, i + 2000).match(BARE);
  if (!match) return null;
  const address = match[0].replace(/[.,;:!?)\]*_~]+$/, "");
  const made = anchor(address, [address]);
  return made && [made, address.length];
}

/** Null for an address that is no link of the web or of mail. */
function anchor(address, shown) {
  const url = URL.canParse(address) ? new URL(address) : null;
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return null;
  return h("a", { href: url.href, target: "_blank", rel: "noopener noreferrer nofollow" }, shown);
}

function emphasis(text, i, depth) {
  for (const [mark, tag] of EMPHASIS) {
    if (!text.startsWith(mark, i)) continue;
    const from = i + mark.length;
    const end = closing(text, mark, from);
    if (end > from) return [h(tag, {}, inline(text.slice(from, end), depth + 1)), end + mark.length - i];
    if (mark.length === 2) return [mark, 2];
  }
  return null;
}

/** Where an emphasis that opens before `from` closes, or -1. */
function closing(text, mark, from) {
  const opens = text[from] !== undefined && !/\s/.test(text[from]);
  const inWord = mark[0] === "_" && WORD.test(text[from - mark.length - 1] ?? "");
  if (!opens || inWord) return -1;
  const limit = Math.min(text.length, from + 2000);
  for (let end = text.indexOf(mark, from + 1); end >= 0 && end < limit; end = text.indexOf(mark, end + 1)) {
    const doubled = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const wordGoesOn = mark[0] === "_" && WORD.test(text[end + mark.length] ?? "");
    if (doubled || wordGoesOn || /\s/.test(text[end - 1]) || text[end - 1] === "\\") continue;
    return mark.length === 2 && text[end + 2] === mark[0] ? end + 1 : end; // ***both***: the inner one closes first
  }
  return -1;
}
