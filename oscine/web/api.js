// The server, as any client sees it: models, chat completions, responses, and which tools it has. Knows HTTP and server-sent events, no elements.

const url = (path) => new URL(path, document.baseURI).href;
export const apiUrl = (path) => url(`v1/${path}`);

/** What went wrong, in the server's words where it had any. */
export class ApiError extends Error {
  constructor(message, { status = 0, param = null, code = null, retryAfter = null } = {}) {
    super(message);
    Object.assign(this, { status, param, code, retryAfter });
  }
}

const headers = (key) => (key ? { Authorization: `Bearer ${key}` } : {});

async function request(path, key, options = {}) {
  let response;
  try {
    response = await fetch(url(path), { ...options, headers: { ...headers(key), ...options.headers } });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (!response.ok) throw await failure(response);
  return response;
}

async function failure(response) {
  const details = { status: response.status, retryAfter: response.headers.get("Retry-After") };
  try {
    const { error } = await response.json();
    return new ApiError(error.message, { ...details, param: error.param, code: error.code });
  } catch {
    return new ApiError(`The server answered with status ${response.status}.`, details);
  }
}

/** [{id, max_model_len}, ...] */
export async function listModels(key) {
  return (await (await request("v1/models", key)).json()).data;
}

/** The server's own tools, as a request for a response names them. */
export async function listTools(key) {
  return (await (await request("server_info", key)).json()).tools;
}

async function* post(path, body, key, signal) {
  const options = { method: "POST", body: JSON.stringify(body), headers: { "Content-Type": "application/json" }, signal };
  yield* serverSentEvents((await request(path, key, options)).body);
}

/** Yields the chunks of a streamed answer. Throws ApiError, also for an error in mid-stream, and AbortError. */
export async function* streamChat(body, key, signal) {
  for await (const data of post("v1/chat/completions", body, key, signal)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message, chunk.error);
    yield chunk;
  }
  throw new ApiError("The connection ended before the answer did.");
}

/** Yields the events of a streamed response. Throws as streamChat does. */
export async function* streamResponse(body, key, signal) {
  for await (const data of post("v1/responses", body, key, signal)) {
    const event = JSON.parse(data);
    if (event.type === "error") throw new ApiError(event.message, event);
    if (event.type === "response.failed") throw new ApiError(event.response.error.message, event.response.error);
    yield event;
    if (event.type === "response.completed" || event.type === "response.incomplete") return;
  }
  throw new ApiError("The connection ended before the answer did.");
}

/** Yields the data of each event; comments, which keep a connection alive, are passed over. */
export async function* serverSentEvents(stream) {
  const decoder = new TextDecoder();
  const reader = stream.getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { done, value } = await read(reader);
      if (done) return;
      const lines = (rest + decoder.decode(value, { stream: true })).split("\n");
      rest = lines.pop();
      for (const line of lines.map((text) => text.replace(/\r$/, ""))) {
        if (line.startsWith("data:")) data.push(line.slice(line[5] === " " ? 6 : 5));
        else if (line === "" && data.length) yield data.splice(0).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection to the server broke off.");
  }
}
