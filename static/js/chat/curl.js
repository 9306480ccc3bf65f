// A request of this conversation as a command for another program.

import { page, url } from "../page.js";

/** Quotes text for a POSIX shell. */
export const shellQuote = (text) => `'${text.replaceAll("'", "'\\''")}'`;

/** curl for the same answer through /v1. */
export function curlCommand(messages, params) {
  const body = { model: page.model, messages, stream: true };
  for (const [name, value] of Object.entries(params)) if (value !== null && value !== undefined && !(Array.isArray(value) && !value.length)) body[name] = value;
  return [
    `curl -N ${shellQuote(new URL(url("/v1/chat/completions"), location.href).href)}`,
    `  -H ${shellQuote("Content-Type: application/json")}`,
    `  -d ${shellQuote(JSON.stringify(body, null, 2))}`,
  ].join(" \\\n");
}
