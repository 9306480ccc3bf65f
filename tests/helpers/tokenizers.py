"""A whole tokenizer without a model: one token per byte, built in memory in a millisecond."""

from __future__ import annotations

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from engine.tokenizer.chat_template import ChatTemplate
from engine.tokenizer.token_table import byte_level_alphabet
from engine.tokenizer.tokenizer import Tokenizer

SPECIAL_TOKENS = ("<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>")
BOS, EOS, IM_START, IM_END = range(256, 260)
VOCAB_SIZE = 300  # ids 260 to 299 are words, so that some tokens have several bytes

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# fmt: off
WORDS = (
    "the", "quick", "brown", "fox", "jumps", "over", "lazy", "dog", "and", "then", "one", "two", "three", "four",
    "five", "six", "seven", "eight", "nine", "ten", "red", "green", "blue", "Prague", "Brno", "hello", "world", "yes",
    "no", "maybe", "token", "block", "page", "cache", "step", "queue", "engine", "deck", "end", "answer",
)
# fmt: on


def byte_tokenizer() -> Tokenizer:
    """Id b is the byte b (0 to 255), then four special tokens of which `<|eos|>` and `<|im_end|>` end an answer, then
    the 40 words, each after a space (" the" is one token)."""
    byte_of = byte_level_alphabet()
    character_of = {byte: character for character, byte in byte_of.items()}
    vocab = {character_of[byte]: byte for byte in range(256)}
    merges: list[tuple[str, str]] = []
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    backend.add_tokens([AddedToken(f" {word}", special=False, normalized=False) for word in WORDS])
    return Tokenizer(
        backend,
        eos_token_ids=(EOS, IM_END),
        bos_token_id=BOS,
        chat_template=ChatTemplate(CHAT_TEMPLATE, {"bos_token": "<|bos|>", "eos_token": "<|eos|>"}),
        name="byte",
    )
