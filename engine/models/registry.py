"""The architectures this engine computes: one table."""

from __future__ import annotations

from engine.errors import StartupError
from engine.models.family import Family
from engine.models.llama import LLAMA, MISTRAL
from engine.models.qwen2 import QWEN2
from engine.models.qwen3 import QWEN3

FAMILIES: tuple[Family, ...] = (LLAMA, MISTRAL, QWEN2, QWEN3)


def family_of_hf(architectures: object) -> Family:
    """The family of a `config.json`'s `architectures`.

    Raises:
        StartupError: none of them is supported; lists those that are.
    """
    names = architectures if isinstance(architectures, list) else []
    for family in FAMILIES:
        if family.architecture in names:
            return family
    supported = ", ".join(family.architecture for family in FAMILIES)
    raise StartupError(f"architecture {', '.join(map(str, names)) or '(none given)'} is not supported: {supported}")


def family_of_gguf(architecture: str) -> Family:
    """The family of a GGUF file's `general.architecture`.

    Raises:
        StartupError: it is not supported; lists those that are.
    """
    for family in FAMILIES:
        if family.gguf_architecture == architecture:
            return family
    supported = ", ".join(family.gguf_architecture for family in FAMILIES if family.gguf_architecture)
    raise StartupError(f"GGUF architecture {architecture!r} is not supported: {supported}")
