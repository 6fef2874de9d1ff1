// Which API a conversation's requests go to: chat completions, or responses where tools of the server are switched on.

import { chatParameters, wireMessages } from "./request.js";
import { inputItems, responseParameters } from "./responses.js";

/** The body without the conversation, as it is kept with an answer. Throws SettingError. */
export const parameters = (settings) => (settings.builtin.length ? responseParameters(settings) : chatParameters(settings));

/** `sent` with a conversation, the question last. `lead` has the instructions and their role. */
export const withConversation = (sent, messages, lead) =>
  isResponse(sent) ? { ...sent, input: inputItems(messages, lead) } : { ...sent, messages: wireMessages(messages, lead) };

export const isResponse = (body) => body.input !== undefined;

export const isJson = (body) => Boolean(body.response_format ?? body.text?.format);

export const tokenLimit = (body) => body.max_completion_tokens ?? body.max_output_tokens;
