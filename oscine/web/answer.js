// An answer while it arrives: what its chunks add up to, and how long they took. Knows no elements and no HTTP.

/** A message of the conversation; `sent` is the request without its messages. */
export function newAnswer(sent) {
  return { role: "assistant", content: "", reasoning: "", tool_calls: [], sent, stats: {} };
}

/** Adds a chunk that arrived `ms` after the request was sent. */
export function addChunk(answer, chunk, ms) {
  if (chunk.usage) answer.stats.usage = chunk.usage;
  const [choice] = chunk.choices;
  if (!choice) return;
  answer.stats.beganMs ??= ms; // the server sends the role with the first token, which may have no text
  const { delta, finish_reason: finish } = choice;
  if (finish) answer.stats.finish = finish;
  const thought = delta.reasoning ?? delta.reasoning_content ?? "";
  const said = delta.content ?? "";
  const calls = delta.tool_calls ?? [];
  if (!thought && !said && !calls.length) return;
  answer.stats.firstMs ??= ms;
  answer.stats.lastMs = ms;
  if (said || calls.length) answer.stats.thoughtMs ??= ms;
  answer.reasoning += thought;
  answer.content += said;
  calls.forEach((piece) => addCall(answer.tool_calls, piece));
}

function addCall(calls, piece) {
  const call = (calls[piece.index] ??= { id: "", type: "function", function: { name: "", arguments: "" } });
  call.id += piece.id ?? "";
  call.function.name += piece.function?.name ?? "";
  call.function.arguments += piece.function?.arguments ?? "";
}

const LEAST_MS = 500; // events of a shorter time may have waited for each other: they give no rate

const WHY = {
  length: "cut off by the token limit",
  content_filter: "filtered",
  stopped: "stopped by you",
  error: "broken off",
};

/** The figures of an answer, as short texts in the order in which they are shown. */
export function figures({ stats }) {
  const { usage, beganMs, firstMs, lastMs, finish } = stats;
  const texts = [];
  if (firstMs !== undefined) texts.push(`${duration(firstMs)} to first token`);
  const generated = usage?.completion_tokens;
  if (generated > 1 && lastMs - beganMs >= LEAST_MS) {
    texts.push(`${number(((generated - 1) / (lastMs - beganMs)) * 1000)} tokens/s`);
  }
  if (usage) texts.push(...usageTexts(usage));
  if (WHY[finish] && (finish !== "error" || firstMs !== undefined)) texts.push(WHY[finish]);
  return texts;
}

function usageTexts(usage) {
  const cached = usage.prompt_tokens_details?.cached_tokens;
  const thought = usage.completion_tokens_details?.reasoning_tokens;
  return [
    `${usage.prompt_tokens} in${cached ? ` (${cached} cached)` : ""}`,
    `${usage.completion_tokens} out${thought ? ` (${thought} thinking)` : ""}`,
  ];
}

export const duration = (ms) => (ms < 1000 ? `${Math.round(ms)} ms` : `${(ms / 1000).toFixed(1)} s`);

const number = (value) => (value < 100 ? value.toFixed(1) : String(Math.round(value)));
