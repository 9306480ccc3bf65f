"""What the loader must know of a model family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Family:
    """One supported architecture."""

    architecture: str  # Hugging Face's class name
    gguf_architecture: str | None  # `general.architecture`; None = its GGUF files go by another family's name
    hf_name: Callable[[str], str | None]  # GGUF tensor name -> Hugging Face's
    interleaved_in_gguf: tuple[str, ...]  # projections whose rows GGUF files order for neighbouring rotary pairs
