"""The README tells the truth about flags and targets."""

from __future__ import annotations

import re
from pathlib import Path

from app.settings import markdown_table


def test_the_readmes_table_of_flags_is_the_one_the_settings_print(root: Path) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert markdown_table().strip() in readme


def test_every_make_target_that_the_readme_names_exists(root: Path) -> None:
    makefile = (root / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"(?m)^([a-z-]+):", makefile))
    named = set(re.findall(r"\bmake ([a-z-]+)", (root / "README.md").read_text(encoding="utf-8")))
    assert "serve" in named
    assert named <= targets


def test_every_test_that_the_table_of_faults_names_exists(root: Path) -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (root / "tests" / "README.md").read_text(encoding="utf-8"))
    assert len(named) > 40
    for file, name in named:
        assert f"def test_{name}(" in (root / "tests" / file).read_text(encoding="utf-8"), f"{file}: {name}"
