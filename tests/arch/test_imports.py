"""The direction of imports, and what importing a module costs."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = ("app", "engine", "kernels")


def imported_after(statement: str, root: Path) -> set[str]:
    """Top-level modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}; import sys; print(' '.join({{name.split('.')[0] for name in sys.modules}}))"
    run = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def python_files(root: Path) -> list[Path]:
    """All Python files of the three packages."""
    files = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    assert len(files) > 20
    return files


def test_the_contracts_on_imports_hold(root: Path) -> None:
    command = Path(sys.executable).with_name("lint-imports")
    if not command.exists():
        pytest.skip("import-linter is not installed; `make test` installs it")
    run = subprocess.run([command, "--no-cache"], cwd=root, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    contracts = (root / "pyproject.toml").read_text(encoding="utf-8").count("[[tool.importlinter.contracts]]")
    assert f"Contracts: {contracts} kept, 0 broken." in run.stdout


@pytest.mark.parametrize("module", ["engine.core.scheduler", "engine.core.stats", "engine.config", "engine.errors"])
def test_the_brain_and_the_messages_import_without_torch_or_asyncio(module: str, root: Path) -> None:
    assert imported_after(f"import {module}", root).isdisjoint({"torch", "numpy", "asyncio", "starlette"})


@pytest.mark.parametrize("module", ["app.cli", "app.settings", "app.version", "engine.bench.workloads"])
def test_the_command_line_imports_nothing_heavy(module: str, root: Path) -> None:
    assert imported_after(f"import {module}", root).isdisjoint({"torch", "numpy", "starlette", "httpx", "transformers"})


def test_importing_the_packages_imports_nothing_heavy(root: Path) -> None:
    loaded = imported_after("import app, engine, kernels", root)
    assert loaded.isdisjoint({"torch", "numpy", "starlette", "transformers"})


def test_kernels_has_no_version_that_others_could_take_for_another_package(root: Path) -> None:
    assert "__version__" not in (root / "kernels/__init__.py").read_text(encoding="utf-8")


def test_only_the_settings_read_the_environment(root: Path) -> None:
    readers = {
        str(path.relative_to(root))
        for path in python_files(root)
        if reads_environment(path.read_text(encoding="utf-8"))
    }
    assert readers == {"app/settings.py"}


def reads_environment(source: str) -> bool:
    """Whether the code looks at an environment variable; `setdefault`, which tells a library something, is allowed."""
    tree = ast.parse(source)
    told = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr == "setdefault" and isinstance(node.value, ast.Attribute)
    }
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and id(node) not in told}
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
    return bool((names | imported) & {"environ", "environb", "getenv", "getenvb"})


@pytest.mark.parametrize(
    ("source", "reads"),
    [
        ("import os; os.environ['A']", True),
        ("import os; os.getenv('A')", True),
        ("from os import environ", True),
        ("import os; os.environ.get('A')", True),
        ("import os; os.environ.setdefault('A', 'b')", False),
        ("import os; os.cpu_count()", False),
    ],
)
def test_the_check_for_readers_of_the_environment_finds_them(source: str, reads: bool) -> None:
    assert reads_environment(source) is reads
