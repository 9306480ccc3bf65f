"""What the fake model reads of a conversation, and what it says."""

from __future__ import annotations

from engine.sampling_params import SamplingParams
from tests.helpers.fake_runner import expected_tokens
from tests.helpers.tokenizers import byte_tokenizer

GREEDY = SamplingParams(temperature=0.0)
MESSAGES = [{"role": "user", "content": "hello"}]


def chat_prompt(*messages: tuple[str, str]) -> list[int]:
    """Token ids of (role, content) in the test template, up to where the assistant begins."""
    text = "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)
    return byte_tokenizer().encode(text + "<|im_start|>assistant\n", add_special_tokens=False)


CHAT_PROMPT = chat_prompt(("user", "hello"))


def expected_text(prompt: list[int], num_tokens: int, params: SamplingParams = GREEDY) -> str:
    """The fake model's answer to `prompt`."""
    return bytes(expected_tokens(prompt, params, num_tokens)).decode()
