// Colours for code: comments, texts, numbers and keywords. It knows what families of languages have in common, no more.

import { h } from "./dom.js";

const words = (text) => new Set(text.split(" "));
const MOST = 50_000; // characters; longer code has no colours

const SLASHES = String.raw`\/\/.*|\/\*[^]*?(?:\*\/|$)`;
const HASHES = String.raw`(?<!\S)#.*`;
const DASHES = String.raw`--.*|\/\*[^]*?(?:\*\/|$)`;
const TRIPLE = String.raw`"""[^]*?(?:"""|$)|'''[^]*?(?:'''|$)`;
const QUOTED = String.raw`"(?:[^"\\\n]|\\.)*"|(?<![\w])'(?:[^'\\\n]|\\.)*'`;
const CHARACTERS = String.raw`"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\[^'\n]{1,9}|\\')'`; // and 'a of Rust is a lifetime
const BACKTICKS = "`(?:[^`\\\\]|\\\\.)*(?:`|$)";

const family = (names, comments, texts, keywords, ignoreCase = false) => ({
  names: words(names),
  keywords: words(keywords),
  ignoreCase,
  pattern: new RegExp(
    [
      comments && `(?<comment>${comments})`,
      `(?<string>${texts})`,
      String.raw`(?<number>\b0[xXbBoO][\da-fA-F_]+\b|\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b)`,
      String.raw`(?<word>[A-Za-z_$][\w$]*)`,
    ].filter(Boolean).join("|"),
    "g",
  ),
});

const FAMILIES = [
  family(
    "python py python3 ipython",
    HASHES,
    `${TRIPLE}|${QUOTED}`,
    "and as assert async await break case class continue def del elif else except False finally for from global if import in is lambda match None nonlocal not or pass raise return True try while with yield",
  ),
  family(
    "javascript js jsx typescript ts tsx mjs node php dart",
    SLASHES,
    `${QUOTED}|${BACKTICKS}`,
    "as async await break case catch class const continue default delete do else enum export extends false finally for from function if implements import in instanceof interface let new null of return static super switch this throw true try type typeof undefined var void while yield",
  ),
  family(
    "c h cpp c++ cc hpp cuda java csharp cs c# go golang rust rs kotlin kt swift scala zig",
    SLASHES,
    CHARACTERS,
    "abstract as async auto await bool boolean break byte case catch chan char class const constexpr continue crate default defer do double else enum extends extern false final finally float fn for foreach func fun go if impl implements import in include inline int interface let long loop match mod mut namespace new nil null nullptr override package private protected public pub range return self short signed sizeof static struct super switch template this throw trait true try type typedef typename union unsafe unsigned use using val var virtual void volatile where while yield",
  ),
  family(
    "bash sh shell zsh console fish dockerfile makefile make ruby rb perl r julia elixir yaml yml toml ini nix hcl terraform",
    HASHES,
    QUOTED,
    "begin case class def do done elif else elsif end esac export false fi for function if in local module null require return select then true unless until while yield",
  ),
  family(
    "sql postgresql mysql sqlite lua haskell hs",
    DASHES,
    QUOTED,
    "add all alter and as asc between by case create cross default delete desc distinct drop else elseif end exists false for foreign from full function group having if in index inner insert into is join key left let like limit local nil not null of offset on or order outer primary references repeat return right select set table then true union unique until update values view when where while with",
    true,
  ),
  family("json jsonl json5 jsonc", SLASHES, QUOTED, "true false null"),
];

/** Texts and elements for code in a language; in an unknown one, the text as it is. */
export function coloured(text, language) {
  const found = FAMILIES.find(({ names }) => names.has((language ?? "").toLowerCase()));
  if (!found || text.length > MOST) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(found.pattern)) {
    const kind = kindOf(match.groups, found);
    if (!kind) continue;
    nodes.push(text.slice(at, match.index), h("span", { class: `code-${kind}` }, match[0]));
    at = match.index + match[0].length;
  }
  return [...nodes, text.slice(at)].filter((node) => node !== "");
}

function kindOf({ word, comment, string, number }, { keywords, ignoreCase }) {
  if (word) return keywords.has(ignoreCase ? word.toLowerCase() : word) && "keyword";
  return (comment && "comment") || (string && "string") || (number && "number");
}
