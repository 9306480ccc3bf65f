"""The embedded model's tokenizer, loaded once."""

from __future__ import annotations

import pytest

from engine.tokenizer.source import find_tokenizer
from engine.tokenizer.tokenizer import Tokenizer, load_tokenizer
from tests.tokenizer.byte_pairs import ReferenceBpe


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    return load_tokenizer("smollm2")


@pytest.fixture(scope="session")
def reference() -> ReferenceBpe:
    """The reference encoder over the embedded model's vocabulary, read with the library's own reader."""
    from gguf import GGUFReader

    reader = GGUFReader(find_tokenizer("smollm2"))
    tokens, merges = (reader.fields[f"tokenizer.ggml.{name}"].contents() for name in ("tokens", "merges"))
    return ReferenceBpe(tokens, merges, special=tokens[:17])
