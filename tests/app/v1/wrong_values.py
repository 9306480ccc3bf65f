"""Every field of every API, and wrong values of it."""

from __future__ import annotations

HUGE = 10**30
WRONG_TYPES: dict[str, list[object]] = {
    "boolean": ["yes", 1, 0.5, [], {}],
    "integer": ["7", 1.5, True, [], {}],
    "number": ["hot", True, [], {}],
    "string": [7, True, [], {}],
    "object": ["x", 7, True, []],
}
COMMON_FIELDS: dict[str, tuple[str, list[object]]] = {  # field -> (its type, values outside its range)
    "model": ("string", []),
    "stream": ("boolean", []),
    "temperature": ("number", [-0.1, 2.1, HUGE]),
    "top_p": ("number", [0, -1, 1.01]),
    "top_k": ("integer", [-2]),
    "min_p": ("number", [-0.1, 1.1]),
    "seed": ("integer", [HUGE, -HUGE]),
    "presence_penalty": ("number", [-2.1, 2.1]),
    "frequency_penalty": ("number", [-2.1, 2.1]),
    "repetition_penalty": ("number", [0, -1]),
    "min_tokens": ("integer", [-1, 10_000]),
    "ignore_eos": ("boolean", []),
    "include_stop_str_in_output": ("boolean", []),
    "skip_special_tokens": ("boolean", []),
    "return_timings": ("boolean", []),
    "request_id": ("string", ["", "a b", "a.1", "é", "a" * 129]),
    "bad_words": ("", [7, "x", True, {}, [7], [""], [None], [["a"]], ["a"] * 257]),
    "allowed_token_ids": ("", [7, "7", ["7"], [1.5], [True], [-1], [300], [HUGE], [[1]], [], {}]),
    "guided_json": ("", [7, True, [], "{", "7", '{"type": "nothing"}', {"type": "nothing"}, {"type": 7},
                         {"type": "array", "uniqueItems": True}, {"$ref": "#/$defs/x"}, {"enum": ["a" * 70_000]},
                         {"pattern": "(a"}, {"allOf": [{"pattern": f".*{c}.*"} for c in "abcdefghij"]}]),
    "guided_regex": ("string", ["(a", "x" * 9000, "[z-a]", "(?<=a)b", r"(a)\1"]),
    "guided_choice": ("", [7, "a", True, {}, [], [""], [7], [None], ["a"] * 1025]),
    "guided_grammar": ("string", ["", "no grammar", "start: nowhere", "x" * 70_000]),
    "structured_outputs": ("object", [{"json": 7}, {"json": "{"}, {"regex": 7}, {"regex": "(a"}, {"choice": []},
                                      {"grammar": "start: nowhere"}, {"json_object": "yes"},
                                      {"structural_tag": "x"}, {"regex": "a", "choice": ["b"]}]),
    "truncate_prompt_tokens": ("", [5]),
    "priority": ("integer", [HUGE, -HUGE]),
    "queue_timeout_s": ("number", [0, -1]),
    "request_timeout_s": ("number", [0, -1]),
    "cache_salt": ("string", ["", "s" * 1025]),
    "logit_bias": ("object", [{"x": 1}, {"": 1}, {"1.5": 1}, {"5": "much"}, {"5": None}, {"5": 101}, {"-1": 1},
                              {"300": 1}, {str(HUGE): 1}, {"5": True}]),
    "stop": ("", [7, True, {}, [7], [""], "", [["a"]], ["a"] * 65, [None]]),
    "stop_token_ids": ("", [7, "7", ["7"], [1.5], [True], [-1], [300], [HUGE], [[1]], [1] * 1025, {}]),
}  # fmt: skip
TOOL_FIELDS: dict[str, tuple[str, list[object]]] = {
    "tools": ("", [7, "x", {}, True, [7], [None], [[]]]),
    "tool_choice": ("", [7, True, [], {}, "", "required", "any", {"type": 7}, {"type": "any"},
                         {"type": "tool", "name": "f"},
                         {"type": "function", "function": {"name": "f"}}, {"type": "allowed_tools", "mode": "required"},
                         {"type": "allowed_tools", "allowed_tools": {"mode": "required"}}]),
}  # fmt: skip
_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}
GENERATION_FIELDS: dict[str, tuple[str, list[object]]] = {
    **COMMON_FIELDS,
    "n": ("integer", [0, -1, 257, HUGE]),
    "max_tokens": ("integer", [0, -1]),
    "stream_options": ("object", []),
    "return_token_ids": ("boolean", []),
    "prompt_logprobs": ("integer", [-1, 21]),
    "response_format": ("object", [{}, {"type": "x"}, {"type": "json_schema"}, {"type": 7}, _SCHEMA,
                                   {"type": "json_schema", "json_schema": {}}, {"type": "structural_tag"},
                                   {"type": "json_schema", "json_schema": {"schema": 7}}]),
}  # fmt: skip
COMPLETION_FIELDS: dict[str, tuple[str, list[object]]] = {
    **GENERATION_FIELDS,
    "prompt": ("", [7, True, {}, [], "", [""], [True], [1.5], ["a", 1], [1, "a"], [[]], [[1], "a"], [["a"]], [[1.5]],
                    [-1], [300], [HUGE], [[1], [300]], [None], "a" * 9000, [65] * 9000, ["a"] * 1025]),
    "logprobs": ("integer", [-1, 21]),
    "add_special_tokens": ("boolean", []),
    "echo": ("boolean", []),
    "suffix": ("", ["x"]),
    "best_of": ("", [3]),
}  # fmt: skip
MESSAGES: list[object] = [
    7, True, "hi", {}, [], [7], ["hi"], [None], [[]], [{}], [{"role": "user"}],
    [{"role": "nobody", "content": "a"}], [{"role": 7, "content": "a"}], [{"content": "a"}],
    [{"role": ["user"], "content": "a"}], [{"role": "user", "content": 7}],
    [{"role": "user", "content": {}}], [{"role": "user", "content": [7]}],
    [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": [{"type": "text", "text": 7}]}],
    [{"role": "assistant", "content": "a", "tool_calls": 7}],
    [{"role": "user", "content": "a" * 9000}],
]  # fmt: skip
CHAT_FIELDS: dict[str, tuple[str, list[object]]] = {
    **GENERATION_FIELDS,
    **TOOL_FIELDS,
    "functions": ("", [7, "x", {}, [7]]),
    "function_call": ("", [7, True, [], {}, "", "f", {"name": "f"}]),
    "messages": ("", MESSAGES),
    "max_completion_tokens": ("integer", [0, -1]),
    "logprobs": ("boolean", []),
    "top_logprobs": ("integer", [-1, 21, 3]),  # 3: without logprobs
    "add_generation_prompt": ("boolean", []),
    "continue_final_message": ("boolean", [True]),  # the last message is a user's
    "chat_template_kwargs": ("object", [{"self": 1}, {"messages": []}, {"add_generation_prompt": False}]),
}  # fmt: skip
RESPONSES_FIELDS: dict[str, tuple[str, list[object]]] = {
    **COMMON_FIELDS,
    **TOOL_FIELDS,
    "input": ("", [7, True, {}, [], [7], [{"role": "user"}], [{"role": "nobody", "content": "a"}],
                   [{"type": "function_call", "name": "f"}], [{"role": "user", "content": [{"type": "input_image"}]}],
                   [{"role": "user", "content": [7]}], [{"role": "user", "content": {}}], "a" * 9000]),
    "instructions": ("string", []),
    "max_output_tokens": ("integer", [0, -1]),
    "top_logprobs": ("integer", [-1, 21]),
    "text": ("object", [{"format": 7}, {"format": {"type": "x"}}, {"format": {"type": "json_schema"}},
                        {"format": {"type": "json_schema", "schema": {"type": "nothing"}}}]),
    "metadata": ("object", []),
    "include": ("", [7, "x", [7]]),
    "previous_response_id": ("", ["resp_1"]),
    "conversation": ("", ["conv_1"]),
    "background": ("", [True]),
    "truncation": ("", ["auto"]),
}  # fmt: skip
MESSAGES_FIELDS: dict[str, tuple[str, list[object]]] = {
    **{name: row for name, row in COMMON_FIELDS.items() if name != "stop"},
    **TOOL_FIELDS,
    "messages": ("", MESSAGES),
    "max_tokens": ("integer", [0, -1, None]),
    "system": ("", [7, True, {}, [7], [{"type": "image"}]]),
    "stop_sequences": ("", [7, True, {}, [7], [""], ["a"] * 65, [None]]),
    "thinking": ("object", [{}, {"type": "enabled", "budget_tokens": 1024}]),
}  # fmt: skip

CHAT: dict[str, object] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
APIS: dict[str, tuple[dict[str, object], dict[str, tuple[str, list[object]]]]] = {  # path -> (good body, its table)
    "/v1/completions": ({"prompt": "a", "max_tokens": 2}, COMPLETION_FIELDS),
    "/v1/chat/completions": (CHAT, CHAT_FIELDS),
    "/v1/responses": ({"input": "a", "max_output_tokens": 2}, RESPONSES_FIELDS),
    "/v1/messages": (CHAT, MESSAGES_FIELDS),
}
