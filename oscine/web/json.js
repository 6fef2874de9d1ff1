// JSON for people.

/** As JSON.stringify with an indent, but what fits in `width` characters stands on one line. */
export function pretty(value, width = 60, indent = "") {
  if (value === null || typeof value !== "object") return JSON.stringify(value);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const inner = `${indent}  `;
  const entries = Object.entries(value).filter(([, item]) => item !== undefined);
  const key = (name) => (Array.isArray(value) ? "" : `${JSON.stringify(name)}: `);
  const items = entries.map(([name, item]) => key(name) + pretty(item, width, inner));
  const flat = open + items.join(", ") + close;
  if (indent.length + flat.length <= width && !flat.includes("\n")) return flat;
  return `${open}\n${items.map((item) => inner + item).join(",\n")}\n${indent}${close}`;
}

/** JSON with line breaks; any other text as it is. */
export function indented(text) {
  return isJson(text) ? pretty(JSON.parse(text)) : text;
}

export function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
