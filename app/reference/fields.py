"""What each field of a request means, its range, and what is accepted where a validator rewrites it first.

Types come from the models that check them. Ranges are the engine's own; a test holds each of them against it.
"""

from __future__ import annotations

from typing import NamedTuple

from app.openai_api.schemas import DEFAULT_COMPLETION_TOKENS, MAX_BAD_WORDS, MAX_LOGIT_BIASES, MAX_PROMPTS, MAX_STOPS
from app.openai_api.tool_fields import MAY_ANSWER
from engine.core.limits import MAX_TIMEOUT_S
from engine.sampling_params import MAX_LOGPROBS
from engine.tokenizer.chat_template import ROLES

Json = dict[str, object]


class Field(NamedTuple):
    """One field."""

    text: str
    schema: Json = {}  # noqa: RUF012 - read only; keywords beside those of the model


_TOKEN = {"type": "integer", "minimum": 0}

FIELDS: dict[str, Field] = {
    # both APIs
    "model": Field("The served model's name, as /v1/models lists it; absent: the one there is."),
    "stream": Field("Send the answer as server-sent events while it is made, `data: [DONE]` at the end."),
    "stream_options": Field("Only with `stream`: what the stream carries besides the answer."),
    "include_usage": Field("A last chunk without choices tells the usage."),
    "continuous_usage_stats": Field("Each chunk tells the usage so far."),
    "n": Field("Answers to the same prompt; the prompt is computed once.", {"minimum": 1}),
    "temperature": Field("0 takes the likeliest token each time.", {"minimum": 0, "maximum": 2}),
    "top_p": Field("Sample among the likeliest tokens that together have this probability.",
                   {"exclusiveMinimum": 0, "maximum": 1}),
    "top_k": Field("Sample among so many likeliest tokens; 0 and -1: all.", {"minimum": -1}),
    "min_p": Field("Leave out tokens less likely than this fraction of the likeliest.", {"minimum": 0, "maximum": 1}),
    "seed": Field("Makes sampling repeatable.", {"minimum": -(2**63), "maximum": 2**63 - 1}),
    "presence_penalty": Field("Against tokens that are in the answer already.", {"minimum": -2, "maximum": 2}),
    "frequency_penalty": Field("The same, times how often.", {"minimum": -2, "maximum": 2}),
    "repetition_penalty": Field("Divides the scores of tokens of prompt and answer; 1: none.", {"exclusiveMinimum": 0}),
    "logit_bias": Field(f"Added to the scores of tokens: token id -> -100 to 100; at most {MAX_LOGIT_BIASES}."),
    "stop": Field(f"Text that ends the answer, or up to {MAX_STOPS} of them."),
    "stop_token_ids": Field("Tokens that end the answer."),
    "include_stop_str_in_output": Field("Keep the text that stopped it."),
    "ignore_eos": Field("Go on past the model's own end, to `max_tokens`."),
    "min_tokens": Field("No end before so many tokens.", {"minimum": 0}),
    "max_tokens": Field("Longest answer in tokens.", {"minimum": 1}),
    "skip_special_tokens": Field("Leave special tokens out of the text."),
    "priority": Field("With the policy `priority`: lower goes first."),
    "queue_timeout_s": Field("End it with `timeout` if it has not begun by then; the server's limit holds too.",
                             {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}),
    "request_timeout_s": Field("End it with `timeout` after so many seconds; the server's limit holds too.",
                               {"exclusiveMinimum": 0, "maximum": MAX_TIMEOUT_S}),
    "cache_salt": Field("Share cached prefixes only with requests of the same salt."),
    "return_token_ids": Field("Answer with the token ids of prompt and answer too."),
    "request_id": Field("Names the request: the answer's id ends with it, in the engine too."),
    "return_timings": Field("Tell the time in the queue, to the first token and in all."),
    "prompt_logprobs": Field("Tell the log-probabilities of the prompt's tokens, and of so many likeliest ones.",
                             {"minimum": 0, "maximum": MAX_LOGPROBS}),
    "bad_words": Field(f"Text that must not come, up to {MAX_BAD_WORDS}."),
    "allowed_token_ids": Field("Only these tokens may come."),
    "response_format": Field("JSON: `json_object`, or `json_schema` with a schema that the answer fits."),
    "structured_outputs": Field("One of `json`, `regex`, `choice`, `grammar` that the answer fits."),
    "guided_json": Field("A JSON schema that the answer fits."),
    "guided_regex": Field("A regular expression that the answer fits."),
    "guided_choice": Field("The answer is one of these."),
    "guided_grammar": Field("A grammar that the answer fits."),
    "tools": Field("Tools on offer. Accepted, never called: the answer is text."),
    "tool_choice": Field("`auto` or `none`; a choice that forces a call is refused."),
    "functions": Field("`tools` in OpenAI's first form."),
    "function_call": Field("`auto` or `none`."),
    # completions
    "prompt": Field(f"Text, token ids, or a list of up to {MAX_PROMPTS} of either."),
    "add_special_tokens": Field("Put the tokenizer's special tokens around the text."),
    "echo": Field("Put the prompt before the answer; with `max_tokens` 0 there is nothing else."),
    # responses
    "input": Field("A text, or messages with `role` and `content`."),
    "instructions": Field("The system message."),
    "max_output_tokens": Field("Longest answer in tokens; absent: up to the end of the context.", {"minimum": 1}),
    "text": Field("`format`: what the answer fits, as `response_format` of chat."),
    "include": Field("`message.output_text.logprobs`: tell the log-probability of each token."),
    "metadata": Field("Given back as it is."),
    # messages
    "system": Field("The system message, a text or a list of text parts."),
    "stop_sequences": Field(f"Texts that end the answer, up to {MAX_STOPS}."),
    "thinking": Field("`disabled` or absent."),
    # chat
    "messages": Field("The conversation: objects with `role` and `content`, a text or a list of text parts."),
    "max_completion_tokens": Field("The newer name of `max_tokens`; absent: up to the end of the context.",
                                   {"minimum": 1}),
    "top_logprobs": Field("With `logprobs`: so many of the likeliest tokens beside each.",
                          {"minimum": 0, "maximum": MAX_LOGPROBS}),
    "add_generation_prompt": Field("End the prompt where the assistant begins to speak."),
    "continue_final_message": Field("Go on with the last message, an assistant's."),
    "chat_template_kwargs": Field("Variables for the model's chat template."),
    # tokens
    "tokens": Field("Token ids."),
    "return_token_strs": Field("Answer with the text of each token too."),
    # admin
    "reason": Field("Why; everyone sees it."),
    "label": Field("What the key is for."),
    "role": Field("What the key may do: inference (/v1 and the chat), read-only (pages, state, metrics), admin (all)."),
}  # fmt: skip

# (model, field) where one name means two things
FIELDS_OF: dict[tuple[str, str], Field] = {
    ("CompletionBody", "logprobs"): Field("Tell the log-probability of each token, and of so many likeliest ones.",
                                          {"minimum": 0, "maximum": MAX_LOGPROBS}),
    ("CompletionBody", "max_tokens"): Field(f"Longest answer in tokens; absent: {DEFAULT_COMPLETION_TOKENS}.",
                                            {"minimum": 0}),
    ("ChatBody", "logprobs"): Field("Tell the log-probability of each token."),
    ("StepBody", "n"): Field("How many."),
    ("TokenizeTextBody", "prompt"): Field("The text."),
    ("TokenizeChatBody", "add_special_tokens"): Field("The template has written them already."),
}  # fmt: skip


def _message(*kinds: str) -> Json:
    part = {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": list(kinds)}, "text": {"type": "string"}},
    }
    return {
        "type": "object",
        "required": ["role", "content"],
        "properties": {
            "role": {"enum": list(ROLES)},
            "content": {"anyOf": [{"type": "string"}, {"type": "array", "items": part}]},
        },
    }


# What a body may hold where a validator accepts more than the type that it makes of it.
ACCEPTED: dict[tuple[str, str], Json] = {
    ("CompletionBody", "prompt"): {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "items": _TOKEN, "minItems": 1},
            {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_PROMPTS},
            {"type": "array", "minItems": 1, "maxItems": MAX_PROMPTS,
             "items": {"type": "array", "items": _TOKEN, "minItems": 1}},
        ],
    },
    ("*", "stop"): {
        "anyOf": [
            {"type": "string", "minLength": 1},
            {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
        ],
    },
    ("*", "logit_bias"): {
        "type": "object", "propertyNames": {"pattern": "^[0-9]{1,10}$"}, "maxProperties": MAX_LOGIT_BIASES,
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    ("*", "tool_choice"): {
        "anyOf": [
            {"enum": list(MAY_ANSWER)},
            {"type": "object", "required": ["type"], "properties": {"type": {"enum": list(MAY_ANSWER)}}},
        ],
    },
    ("*", "function_call"): {"enum": list(MAY_ANSWER)},
    ("*", "stop_sequences"): {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": MAX_STOPS},
    ("*", "allowed_token_ids"): {"type": "array", "items": _TOKEN, "minItems": 1},
    ("*", "stop_token_ids"): {"type": "array", "items": _TOKEN, "maxItems": 1024},
    ("*", "tokens"): {"type": "array", "items": _TOKEN},
    ("*", "messages"): {"type": "array", "minItems": 1, "items": _message("text")},
    ("ResponsesBody", "input"): {
        "anyOf": [
            {"type": "string"},
            {"type": "array", "minItems": 1, "items": _message("input_text", "output_text", "text")},
        ],
    },
}  # fmt: skip
