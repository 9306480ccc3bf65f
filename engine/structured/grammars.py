"""Structured output: a schema, regex, choice or grammar as a matcher that says which tokens may come next.

A spec is compiled once, off the engine thread (see `AsyncEngine.submit`), and kept while a request needs it. Each
sequence has a matcher of its own, a cheap copy of the compiled one, so siblings and a sequence that starts again after
a preemption are nothing special. The library is llguidance; its limits of work per compilation and per step make a
pathological spec fail by itself, and what they don't cover is tried in another process first (see `trial`).
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance.gbnf_to_lark import any_to_lark

from engine.errors import InvalidValueError
from engine.sampling_params import StructuredSpec
from engine.tokenizer.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

MAX_SPEC_CHARACTERS = 64 * 1024
MAX_REGEX_CHARACTERS = 8 * 1024
MAX_KEPT = 32  # compiled specs that nobody uses now

# Between JSON tokens a few blanks or line ends, not any number: a model at a high temperature may never stop writing
# them.
_JSON_OPTIONS: Any = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,8}"}
_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,  # compilation: about 20 ms
    "step_lexer_fuel": 100_000,  # one mask: about 7 ms
    "step_max_items": 20_000,  # one mask: about 1 ms
    "max_lexer_states": 100_000,  # about 40 MB, of all matchers of a grammar together
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}

# Words in a spec that make the library look for a text which several patterns have in common: that has no limit.
_RISKY = {"json_schema": ('"allOf"', '"pattern', '"format"', '"multipleOf"', '"propertyNames"'), "grammar": "&~%"}
_TRIAL = Path(__file__).with_name("trial.py")
MAX_TRIAL_S = 20.0  # its processor time is limited too; this is for a machine that is busy

Mask = npt.NDArray[np.int32]


class Matcher:
    """How far one sequence's output has come in its grammar."""

    def __init__(self, matcher: llguidance.LLMatcher, grammar: Grammar) -> None:
        self._matcher = matcher
        self._grammar = grammar

    def fill(self, mask: Mask) -> str | None:
        """Write one bit per token that may come next, the lowest first.

        Args:
            mask: `[ceil(vocab_size / 32)]`, contiguous.

        Returns:
            Why there is none (the grammar has outgrown its limits); None if all is well.
        """
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        problem = _error(self._matcher)
        if problem is not None:
            self._grammar.is_spent = True
        return problem

    def accept(self, token_ids: Sequence[int]) -> None:
        """Take the tokens that came. One that the mask didn't allow puts the matcher into an error state, which
        `fill` tells; once the grammar is complete there is nothing left to follow."""
        if not self._matcher.is_stopped():
            self._matcher.consume_tokens(list(token_ids))

    @property
    def is_complete(self) -> bool:
        """Whether the output so far is a whole sentence of the grammar."""
        return self._matcher.is_accepting()


class Grammar:
    """A compiled spec. Its matchers share what they learn of it, and so they share its limits."""

    def __init__(self, prototype: llguidance.LLMatcher) -> None:
        self._prototype = prototype
        self.is_spent = False  # a limit was reached: who comes now needs it compiled anew

    def matcher(self) -> Matcher:
        """A matcher at the beginning."""
        return Matcher(self._prototype.deep_copy(), self)


class Grammars:
    """The compiled specs of an engine. `compile` is for any thread; everything else is for the engine's.

    Args:
        tokenizer: whose tokens the masks are about.
        vocab_size: number of logits, at least the tokenizer's.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._library_tokenizer: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[StructuredSpec, Grammar] = OrderedDict()  # the latest used last
        self._users: dict[str, StructuredSpec] = {}  # request -> its spec
        self._num_users: dict[StructuredSpec, int] = {}

    def find(self, spec: StructuredSpec) -> Grammar | None:
        """A spec's compiled form, if there is one that is good for more; also for another thread."""
        grammar = self._kept.get(spec)
        return None if grammar is None or grammar.is_spent else grammar

    def compile(self, spec: StructuredSpec) -> Grammar:
        """Compile, and try one mask so that what cannot work is found here.

        Raises:
            InvalidValueError: the spec is wrong, too large or needs too much work; `param` is the field it came in.
        """
        limit = MAX_REGEX_CHARACTERS if spec.kind == "regex" else MAX_SPEC_CHARACTERS
        if len(spec.text) > limit:
            raise InvalidValueError(spec.param, f"{len(spec.text)} characters", f"at most {limit} characters")
        try:
            source = _grammar_source(spec)
        except ValueError as error:
            raise _refused(spec, str(error)) from None
        if any(word in spec.text for word in _RISKY.get(spec.kind, ())):
            problem = _trial(source)
            if problem is not None:
                raise _refused(spec, problem)
        matcher = llguidance.LLMatcher(
            self._tokenizer_of_library(spec), source, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS)
        )
        problem, grammar = _error(matcher), Grammar(matcher)
        if problem is None:
            trial = grammar.matcher()
            mask = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
            problem = trial.fill(mask)
            if problem is None and not mask.any():
                problem = "no text satisfies it"
        if problem is not None:
            raise _refused(spec, problem)
        return grammar

    def hold(self, request_id: str, spec: StructuredSpec, grammar: Grammar | None) -> None:
        """Keep the compiled spec until `release`; compiles it if nobody has.

        Raises:
            InvalidValueError: see `compile`.
        """
        self._kept[spec] = self.find(spec) or grammar or self.compile(spec)
        self._kept.move_to_end(spec)
        self._users[request_id] = spec
        self._num_users[spec] = self._num_users.get(spec, 0) + 1
        unused = [kept for kept in self._kept if kept not in self._num_users]
        for kept in unused[: max(0, len(unused) - MAX_KEPT)]:
            del self._kept[kept]

    def release(self, request_id: str) -> None:
        """The request has ended; does nothing for one without a spec."""
        spec = self._users.pop(request_id, None)
        if spec is not None:
            self._num_users[spec] -= 1
            if not self._num_users[spec]:
                del self._num_users[spec]

    def matcher(self, spec: StructuredSpec, output_token_ids: Sequence[int] = ()) -> Matcher:
        """A matcher that has seen `output_token_ids`, for a sequence whose request holds `spec`."""
        matcher = (self._kept.get(spec) or self.compile(spec)).matcher()
        if output_token_ids:
            matcher.accept(output_token_ids)
        return matcher

    def _tokenizer_of_library(self, spec: StructuredSpec) -> llguidance.LLTokenizer:
        if self._library_tokenizer is None:
            table = self._tokenizer.table
            if table is None:
                raise _refused(spec, "this model's tokenizer decodes tokens differently in different contexts")
            self._library_tokenizer = llguidance.LLTokenizer(
                llguidance.TokenizerWrapper(_Vocabulary(self._tokenizer, table.pieces, self._vocab_size)),
                eos_token=list(self._tokenizer.eos_token_ids),
            )
        return self._library_tokenizer


class _Vocabulary:
    """What the library asks of a tokenizer."""

    def __init__(self, tokenizer: Tokenizer, pieces: list[bytes], vocab_size: int) -> None:
        self.eos_token_id = tokenizer.eos_token_ids[0]
        self.bos_token_id = tokenizer.bos_token_id
        self.special_token_ids = sorted(tokenizer.special_token_ids)
        self.tokens = [*pieces, *[b""] * (vocab_size - len(pieces))]  # ids that are no token are never allowed
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        text = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._tokenizer.encode(text, add_special_tokens=False)


def _grammar_source(spec: StructuredSpec) -> str:
    """The spec in the library's own form."""
    match spec.kind:
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(spec.text, defaults=_JSON_OPTIONS)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec.text)
        case "choice":
            choices: list[str] = json.loads(spec.text)
            return llguidance.LLMatcher.grammar_from_lark("start: " + " | ".join(json.dumps(text) for text in choices))
        case "grammar":
            return llguidance.LLMatcher.grammar_from_lark(_lark(spec.text))


def _trial(source: str) -> str | None:
    """What is wrong with a grammar, found where it can do no harm; None if nothing is."""
    command = [sys.executable, "-P", str(_TRIAL)]
    try:
        done = subprocess.run(command, input=source.encode(), capture_output=True, timeout=MAX_TRIAL_S, check=False)
    except subprocess.TimeoutExpired:
        return "it needs too much work"
    if done.returncode != 0:  # a signal: its limits; anything else is memory that was refused, or a fault of ours
        if done.returncode > 0:
            logger.warning("a trial of a grammar ended with status %d", done.returncode)
        return "it needs too much work"
    return done.stdout.decode(errors="replace") or None


def _lark(text: str) -> str:
    try:
        source: Any = any_to_lark(text)
    except Exception as error:  # noqa: BLE001 - the converter raises that very class
        raise ValueError(f"neither Lark nor GBNF: {error}") from None
    return str(source)


def _error(matcher: llguidance.LLMatcher) -> str | None:
    if not matcher.is_error():
        return None
    return matcher.get_error().replace("<non-verbose/>", "").strip() or "the grammar needs too much work"


def _refused(spec: StructuredSpec, reason: str) -> InvalidValueError:
    shown = spec.text if len(spec.text) <= 80 else f"{spec.text[:77]}..."
    return InvalidValueError(spec.param, shown, f"something this server can generate ({reason[:500]})")
