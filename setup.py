"""Puts what browsers get into the wheel: templates/ and static/ are outside the packages, `app/_web` is inside.

Everything else about the distribution is in pyproject.toml.
"""

from __future__ import annotations

import ast
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
STATIC = ROOT / "static"
SERVED = (".css", ".js", ".mjs", ".svg", ".png", ".ico", ".woff2", ".webmanifest")
LICENSES = ("license*", "licence*", "copying*", "notice*")


class BuildWithWeb(build_py):
    """Copies templates, static files and the front-end libraries that pages use, with their licences."""

    def run(self) -> None:
        """Build the packages; an editable install reads templates and static files where they lie."""
        super().run()
        if not self.editable_mode:
            web = Path(self.build_lib) / "app" / "_web"
            shutil.rmtree(web, ignore_errors=True)
            for source in web_files():
                target = web / source.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(source, target)


def web_files() -> list[Path]:
    """What `app/_web` holds."""
    templates = [path for path in (ROOT / "templates").rglob("*") if path.is_file()]
    modules = STATIC / "node_modules"
    own = [path for path in STATIC.rglob("*") if path.suffix in SERVED and modules not in path.parents]
    libraries = [modules / name for name in vendor_files()]
    missing = [str(path.relative_to(ROOT)) for path in libraries if not path.is_file()]
    if missing:
        raise SystemExit(f"{missing[0]} is not there: run `npm ci --prefix static` before building a wheel")
    packages = {path.relative_to(modules).parts for path in libraries}
    folders = {modules / "/".join(parts[: 2 if parts[0].startswith("@") else 1]) for parts in packages}
    licenses = [path for folder in folders for path in folder.iterdir() if is_license(path)]
    return sorted({*templates, *own, *libraries, *licenses})


def is_license(path: Path) -> bool:
    """Whether a file at the top of a library is its licence."""
    return path.is_file() and any(Path(path.name.lower()).match(pattern) for pattern in LICENSES)


def vendor_files() -> list[str]:
    """The values of `VENDOR` in app/templating.py, read without importing it: a build has none of its dependencies."""
    tree = ast.parse((ROOT / "app" / "templating.py").read_text(encoding="utf-8"))
    for node in tree.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.target.id == "VENDOR":
            assert node.value is not None
            return [str(value) for value in ast.literal_eval(node.value).values()]
    raise SystemExit("app/templating.py has no table VENDOR")


setup(cmdclass={"build_py": BuildWithWeb})
