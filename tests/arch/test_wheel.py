"""A wheel built from the project holds all that a page needs, and finds it where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from app.templating import VENDOR

TREES = ("app", "engine", "kernels", "templates", "static")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE")


@pytest.fixture(scope="module")
def wheel(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy without network and without an environment of its own."""
    if not all((root / "static/node_modules" / path).is_file() for path in VENDOR.values()):
        pytest.skip("the front-end libraries are not installed; `make setup` installs them")
    source = tmp_path_factory.mktemp("source")
    for name in TREES:
        shutil.copytree(root / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copyfile(root / name, source / name)
    target = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    run = subprocess.run([*command, "--wheel-dir", target, source], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = target.glob("pagedeck-*.whl")
    return path


@pytest.mark.slow
def test_the_wheel_holds_templates_static_files_and_libraries(wheel: Path, root: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    templates = {f"app/_web/{p.relative_to(root)}" for p in (root / "templates").rglob("*.html")}
    own = {
        f"app/_web/{p.relative_to(root)}"
        for p in (root / "static").rglob("*")
        if p.suffix in (".css", ".js", ".svg") and "node_modules" not in p.parts
    }
    libraries = {f"app/_web/static/node_modules/{path}" for path in VENDOR.values()}
    assert templates
    assert own
    assert templates | own | libraries <= names


@pytest.mark.slow
def test_every_library_in_the_wheel_comes_with_its_licence(wheel: Path) -> None:
    names = [name.lower() for name in zipfile.ZipFile(wheel).namelist()]
    for path in VENDOR.values():
        parts = path.lower().split("/")
        folder = "/".join(parts[: 2 if parts[0].startswith("@") else 1])
        assert any(name.startswith(f"app/_web/static/node_modules/{folder}/licen") for name in names), folder


@pytest.mark.slow
def test_the_wheel_holds_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"app", "engine", "kernels", "pagedeck"}
    assert not [name for name in names if name.endswith(("package.json", "package-lock.json", ".pyc"))]
    libraries = [name for name in names if "/node_modules/" in name and "licen" not in name.lower()]
    assert len(libraries) == len(set(VENDOR.values()))


@pytest.mark.slow
def test_the_code_of_the_wheel_finds_its_pages_without_the_checkout(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    code = "from app import templating as t; print(t.TEMPLATES_DIR); print(t.static_file('vendor/htmx.js').is_file())"
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.split() == [str(tmp_path / "site/app/_web/templates"), "True"]
