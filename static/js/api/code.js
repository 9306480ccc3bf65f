// The same request as a command and as programs. What is shown is what a person can paste and run.

import { shellQuote } from "../chat/curl.js";

const OPENAI_CHAT = new Set([
  "model", "messages", "stream", "stream_options", "n", "temperature", "top_p", "seed", "presence_penalty",
  "frequency_penalty", "logit_bias", "stop", "max_tokens", "max_completion_tokens", "logprobs", "top_logprobs",
  "response_format", "user",
]);
const OPENAI_TEXT = new Set([
  "model", "prompt", "stream", "stream_options", "n", "temperature", "top_p", "seed", "presence_penalty",
  "frequency_penalty", "logit_bias", "stop", "max_tokens", "logprobs", "echo", "suffix", "best_of", "user",
]);

/** JSON as a Python literal. */
export function pythonLiteral(value, indent = "") {
  if (value === null || value === undefined) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string") return JSON.stringify(value).replace(/[\u007f-\u009f\u2028\u2029]/g, (c) => `\\u${c.charCodeAt(0).toString(16).padStart(4, "0")}`);
  if (typeof value !== "object") return String(value);
  const inner = `${indent}    `;
  const items = Array.isArray(value)
    ? value.map((item) => pythonLiteral(item, inner))
    : Object.entries(value).map(([name, item]) => `${pythonLiteral(name)}: ${pythonLiteral(item, inner)}`);
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const line = open + items.join(", ") + close;
  if (line.length + indent.length <= 76 && !line.includes("\n")) return line;
  return `${open}\n${items.map((item) => `${inner}${item},\n`).join("")}${indent}${close}`;
}

/**
 * @typedef {{op: string, method: string, address: string, base: string, headers: [string, string][], body: object|null,
 *   rawBody: string|null, needsKey: boolean, model: string, isEndless: boolean}} Call
 */

/** @param {Call} call */
export function curl(call) {
  const isStream = call.isEndless || call.body?.stream === true;
  const method = call.method === "GET" || (call.method === "POST" && call.rawBody !== null) ? "" : `-X ${call.method} `;
  const lines = [`curl ${isStream ? "-N " : ""}${method}${shellQuote(call.address)}`];
  if (call.needsKey) lines.push('-H "Authorization: Bearer $API_KEY"');
  if (call.rawBody !== null) lines.push("-H 'Content-Type: application/json'");
  for (const [name, value] of call.headers) lines.push(`-H ${shellQuote(`${name}: ${value}`)}`);
  if (call.rawBody !== null) lines.push(`-d ${shellQuote(call.rawBody)}`);
  return lines.join(" \\\n  ");
}

/** @param {Call} call */
export function python(call) {
  if (call.op === "create_chat_completion" && call.body) return openaiPython(call, "chat.completions", OPENAI_CHAT, "choice.delta.content");
  if (call.op === "create_completion" && call.body) return openaiPython(call, "completions", OPENAI_TEXT, "choice.text");
  const isStream = call.isEndless || call.body?.stream === true;
  const headers = Object.fromEntries(call.headers);
  const parts = [pythonLiteral(call.address)];
  const headerItems = Object.entries(headers).map(([name, value]) => `${pythonLiteral(name)}: ${pythonLiteral(value)}`);
  if (call.needsKey) headerItems.unshift('"Authorization": f"Bearer {os.environ[\'API_KEY\']}"');
  if (headerItems.length) parts.push(`headers={${headerItems.join(", ")}}`);
  if (call.body !== null) parts.push(`json=${pythonLiteral(call.body, isStream ? "" : "    ")}`);
  const imports = call.needsKey ? "import os\n\nimport httpx\n\n" : "import httpx\n\n";
  if (isStream) {
    return `${imports}with httpx.stream("${call.method}", ${parts.join(", ")}, timeout=None) as response:\n    for line in response.iter_lines():\n        print(line)\n`;
  }
  const method = call.method.toLowerCase();
  const takesBody = call.body === null || method !== "delete";
  const start = takesBody ? `httpx.${method}(` : `httpx.request("${call.method}", `;
  const show = call.op === "metrics" ? "print(response.text)" : "print(response.json())";
  return `${imports}response = ${start}\n    ${parts.join(",\n    ")},\n)\n${show}\n`;
}

function openaiPython(call, place, known, text) {
  const body = { ...call.body, model: call.body.model ?? call.model };
  const own = Object.entries(body).filter(([name]) => known.has(name));
  const extra = Object.fromEntries(Object.entries(body).filter(([name]) => !known.has(name)));
  own.sort(([a], [b]) => (b === "model") - (a === "model"));
  const lines = own.map(([name, value]) => `    ${name}=${pythonLiteral(value, "    ")},\n`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${pythonLiteral(extra, "    ")},\n`);
  const key = call.needsKey ? 'os.environ["API_KEY"]' : '"none"';
  const head = `${call.needsKey ? "import os\n\n" : ""}from openai import OpenAI\n\nclient = OpenAI(base_url=${pythonLiteral(`${call.base}/v1`)}, api_key=${key})\n`;
  if (body.stream === true) {
    return `${head}stream = client.${place}.create(\n${lines.join("")})\nfor chunk in stream:\n    for choice in chunk.choices:\n        print(${text} or "", end="", flush=True)\n`;
  }
  const whole = place === "completions" ? "choice.text" : "choice.message.content";
  return `${head}answer = client.${place}.create(\n${lines.join("")})\nfor choice in answer.choices:\n    print(${whole})\n`;
}

/** @param {Call} call */
export function javascript(call) {
  const isStream = call.isEndless || call.body?.stream === true;
  const headers = Object.fromEntries(call.headers);
  const names = Object.entries(headers).map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  if (call.rawBody !== null) names.unshift('"Content-Type": "application/json"');
  if (call.needsKey) names.unshift("Authorization: `Bearer ${process.env.API_KEY}`");
  const options = [];
  if (call.method !== "GET") options.push(`  method: "${call.method}",\n`);
  if (names.length) options.push(`  headers: { ${names.join(", ")} },\n`);
  if (call.body !== null) options.push(`  body: JSON.stringify(${JSON.stringify(call.body, null, 2).replaceAll("\n", "\n  ")}),\n`);
  const fetched = `const response = await fetch(${JSON.stringify(call.address)}${options.length ? `, {\n${options.join("")}}` : ""});\n`;
  if (isStream) return `${fetched}const text = response.body.pipeThrough(new TextDecoderStream());\nfor await (const part of text) console.log(part);\n`;
  return `${fetched}console.log(await response.${call.op === "metrics" ? "text" : "json"}());\n`;
}

export const LANGUAGES = { curl: { write: curl, grammar: "bash" }, python: { write: python, grammar: "python" }, javascript: { write: javascript, grammar: "javascript" } };
