// Markdown as language models write it, made of elements and text nodes only: no text is ever read as HTML.
// Blocks: headings, paragraphs, fenced code, formulas, lists, tables, quotes, rules. Images are shown as links: nothing is fetched.

import { coloured } from "./code_colors.js";
import { copyText, h } from "./dom.js";
import { formulaBlock, linesOfFormula } from "./formula.js";
import { inline } from "./markdown_inline.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([^\s`]*)/;
const HEADING = /^ {0,3}(#{1,6})\s(.*)$/;
const RULE = /^ {0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^( *)([-*+]|\d{1,9}[.)])(\s+|$)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = /^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
const MAX_DEPTH = 8; // of lists and quotes; deeper ones are text

/** Shows a text that grows: only the blocks that changed are made anew. */
export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.shown = [];
  }

  show(text) {
    const sources = blocks(text.split("\n"));
    const same = this.shown.findIndex((source, i) => source !== sources[i]);
    const keep = same < 0 ? this.shown.length : same;
    while (this.element.childNodes.length > keep) this.element.lastChild.remove();
    this.element.append(...sources.slice(keep).map((source) => block(source, 0)));
    this.shown = sources;
  }
}

/** The source of each block. */
function blocks(lines) {
  const found = [];
  for (let i = 0; i < lines.length; ) {
    if (!lines[i].trim()) {
      i += 1;
      continue;
    }
    const end = endOfBlock(lines, i);
    found.push(lines.slice(i, end).join("\n"));
    i = end;
  }
  return found;
}

function endOfBlock(lines, start) {
  const first = lines[start];
  if (FENCE.test(first)) return endOfFence(lines, start);
  if (HEADING.test(first) || RULE.test(first)) return start + 1;
  const formula = linesOfFormula(lines, start);
  if (formula) return formula[0];
  if (QUOTE.test(first)) return endWhere(lines, start, (line) => !QUOTE.test(line));
  if (ITEM.test(first)) return endOfList(lines, start);
  if (isTable(lines, start)) return endWhere(lines, start + 1, (line) => !line.includes("|"));
  return endWhere(lines, start, (line, i) => !line.trim() || opensBlock(lines, i));
}

function endWhere(lines, start, ends) {
  let i = start + 1;
  while (i < lines.length && !ends(lines[i], i)) i += 1;
  return i;
}

function opensBlock(lines, i) {
  const line = lines[i];
  return [FENCE, HEADING, RULE, QUOTE, ITEM].some((pattern) => pattern.test(line)) || isTable(lines, i) || linesOfFormula(lines, i) !== null;
}

const isTable = (lines, i) =>
  lines[i].includes("|") && i + 1 < lines.length && lines[i + 1].includes("-") && TABLE_RULE.test(lines[i + 1]);

function endOfFence(lines, start) {
  const mark = lines[start].match(FENCE)[1];
  const closes = (line) => line.trim().startsWith(mark) && !line.trim().replaceAll(mark[0], "");
  return Math.min(endWhere(lines, start, closes) + 1, lines.length);
}

/** A list goes on over blank lines as long as what follows is an item or indented. */
function endOfList(lines, start) {
  const indent = lines[start].match(ITEM)[1].length;
  const within = (line) => (ITEM.test(line) && line.match(ITEM)[1].length >= indent) || /^\s{2,}\S/.test(line);
  let end = start + 1;
  for (let i = end; i < lines.length; i += 1) {
    const blank = !lines[i].trim();
    const lazy = !blank && lines[i - 1].trim() && !opensBlock(lines, i);
    if (within(lines[i]) || lazy) end = i + 1;
    else if (!blank) break;
  }
  return end;
}

function block(source, depth) {
  const lines = source.split("\n");
  const first = lines[0];
  if (FENCE.test(first)) return codeBlock(lines);
  if (RULE.test(first)) return h("hr");
  const formula = linesOfFormula(lines, 0);
  if (formula?.[0] === lines.length) return formulaBlock(formula[1], source);
  const heading = first.match(HEADING);
  if (heading) return h(`h${Math.min(heading[1].length + 1, 6)}`, {}, inline(heading[2].trim().replace(/\s#+$/, "")));
  if (depth < MAX_DEPTH && QUOTE.test(first)) {
    return h("blockquote", {}, children(lines.map((line) => line.replace(QUOTE, "")), depth));
  }
  if (depth < MAX_DEPTH && ITEM.test(first)) return list(lines, depth);
  if (isTable(lines, 0)) return table(lines);
  return h("p", {}, inline(lines.map((line) => line.trimStart()).join("\n")));
}

const children = (lines, depth) => blocks(lines).map((source) => block(source, depth + 1));

function codeBlock(lines) {
  const [, mark, language] = lines[0].match(FENCE);
  const last = lines.at(-1).trim();
  const closed = lines.length > 1 && last.startsWith(mark) && !last.replaceAll(mark[0], "");
  return codeFigure(lines.slice(1, closed ? -1 : undefined).join("\n"), language);
}

/** Code with a title and a button that copies it. */
export function codeFigure(text, title, language = title) {
  const copy = h("button", { type: "button", onclick: () => copyText(text, "the code") }, "Copy");
  const head = h("figcaption", {}, h("span", {}, title || "text"), copy);
  // Focusable, so that the keyboard can scroll it.
  return h("figure", { class: "code" }, head, h("pre", { tabindex: "0" }, h("code", {}, coloured(text, language))));
}

function list(lines, depth) {
  const indent = lines[0].match(ITEM)[1].length;
  const items = [];
  for (const line of lines) {
    const match = line.match(ITEM);
    if (match && match[1].length <= indent + 1) items.push({ width: match[0].length, lines: [line.slice(match[0].length)] });
    else items.at(-1).lines.push(unindented(line, items.at(-1).width));
  }
  const marker = lines[0].trimStart();
  const start = parseInt(marker, 10);
  const made = items.map((item) => h("li", {}, itemChildren(item.lines, depth)));
  return Number.isNaN(start) ? h("ul", {}, made) : h("ol", { start: start === 1 ? null : start }, made);
}

const unindented = (line, width) => line.slice(Math.min(width, line.length - line.trimStart().length));

/** The text of a tight item stands without a paragraph around it. */
function itemChildren(lines, depth) {
  const [first, ...others] = children(lines, depth);
  if (!first) return [];
  return [...(first.tagName === "P" ? [...first.childNodes] : [first]), ...others];
}

function table([header, rule, ...rows]) {
  const aligns = cells(rule).map((cell) => `${cell.startsWith(":") ? "l" : ""}${cell.endsWith(":") ? "r" : ""}`);
  const row = (line, tag) => h("tr", {}, cells(line).map((cell, i) => h(tag, { class: ALIGN[aligns[i]] }, inline(cell))));
  const head = h("thead", {}, row(header, "th"));
  const body = h("tbody", {}, rows.map((line) => row(line, "td")));
  return h("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }, h("table", {}, head, body));
}

const ALIGN = { r: "to-right", lr: "to-middle" };

const cells = (line) =>
  line.trim().replace(/^\||(?<!\\)\|$/g, "").split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
