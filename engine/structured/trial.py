"""Run as a process of its own: does this grammar compile with little memory and time?

The library's limits bound most of its work, but not the search for a text that several patterns have in common, which
may take minutes and gigabytes. Whatever happens here happens to this process only.

Reads the library's form of a grammar from the standard input; exits with 0 and prints nothing if it compiles, or prints
what is wrong with it. Imports nothing of the engine, so that it starts fast.
"""

from __future__ import annotations

import resource
import sys

MAX_CPU_S = 2
MAX_MEMORY_BYTES = 1024**3


def main() -> None:
    """Compile what comes in."""
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_S, MAX_CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance

    limits = llguidance.LLParserLimits(verbose_errors=False)
    problem = llguidance.LLMatcher.validate_grammar(sys.stdin.read(), limits=limits)
    sys.stdout.write("" if problem.startswith("WARNING") else problem)


if __name__ == "__main__":
    main()
