// What a new conversation offers; each sets what it needs and asks.

import { SCHEMA_EXAMPLE, TOOL_EXAMPLE, narrow } from "./settings.js";

const PLAIN = { tools: [], builtin: [], toolChoice: "auto", format: "text" };

export const EXAMPLES = [
  { title: "Think it through", question: "What is 27 + 58?", settings: PLAIN },
  {
    title: "Call a function",
    question: "What is the weather in Paris?",
    settings: { ...PLAIN, tools: [{ on: true, text: narrow(TOOL_EXAMPLE) }] },
  },
  {
    title: "Answer as JSON",
    question: "Anna is 34 years old and lives in Oslo.",
    settings: { ...PLAIN, format: "json_schema", schema: narrow(SCHEMA_EXAMPLE) },
  },
];
