"""Budgets and names of files, and that no page fetches anything from elsewhere."""

from __future__ import annotations

import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

MAX_LINES = 500
TOP_LEVEL = {
    "app", "engine", "kernels", "templates", "static", "tests", ".ci",
    "pyproject.toml", "setup.py", "constraints.txt", "MANIFEST.in", "Makefile", "README.md", "CHANGELOG.md",
    "CONTRIBUTING.md", "LICENSE", ".gitignore", ".pre-commit-config.yaml",
}  # fmt: skip
LIBRARIES = {"gguf", "triton", "openai", "torch", "transformers", "tokenizers", "starlette", "safetensors", "httpx"}
SOURCES = (".py", ".js", ".css", ".html", ".md", ".toml", ".yaml")


def tracked_files(root: Path) -> list[Path]:
    """Files that are, or would be, under version control."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    git = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    paths = [root / line for line in git.stdout.splitlines()]
    found = [path for path in paths if path.is_file()]
    assert len(found) > 40
    return found


def test_no_file_is_longer_than_the_budget(root: Path) -> None:
    lengths = {
        str(path.relative_to(root)): len(path.read_text(encoding="utf-8").splitlines())
        for path in tracked_files(root)
        if path.suffix in (".py", ".js", ".css", ".html")
    }
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_no_module_is_a_drawer_for_everything_or_named_after_a_library(root: Path) -> None:
    modules = [path for path in tracked_files(root) if path.suffix == ".py"]
    stems = {path.stem: path for path in modules}
    assert not {"utils", "util", "helpers", "common", "misc"} & set(stems)
    packages = [path for path in modules if path.relative_to(root).parts[0] in ("app", "engine", "kernels")]
    named = {str(path) for path in packages if {path.stem, path.parent.name} & LIBRARIES}
    assert named == set()


def test_the_top_level_holds_what_was_agreed_and_nothing_else(root: Path) -> None:
    names = {path.relative_to(root).parts[0] for path in tracked_files(root)}
    assert names <= TOP_LEVEL
    assert {"app", "engine", "kernels", "templates", "static", "tests", "README.md"} <= names


class _Fetches(HTMLParser):
    """Collects the addresses that a browser would load by itself; links that a person clicks are not among them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            loads = name in ("src", "srcset", "poster", "data", "action") or (name == "href" and tag != "a")
            if loads and value and re.match(r"\s*(https?:)?//", value):
                self.found.append(value)


def outside_fetches(path: Path) -> list[str]:
    """Addresses of other hosts that the file makes a browser fetch."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        parser = _Fetches()
        parser.feed(text)
        return parser.found
    if path.suffix == ".css":
        return re.findall(r"""(?:url\(|@import)\s*["']?((?:https?:)?//[^"')\s]+)""", text)
    code = re.sub(r"(?m)^\s*(//|\*).*$", "", text)
    return [url for url in re.findall(r"""["'`](https?://[^"'`\s]+)""", code) if "www.w3.org/" not in url]


@pytest.mark.parametrize("suffix", [".html", ".css", ".js"])
def test_no_page_style_or_script_fetches_from_another_host(suffix: str, root: Path) -> None:
    files = [
        p for p in tracked_files(root) if p.suffix == suffix and p.relative_to(root).parts[0] in ("templates", "static")
    ]
    assert files
    assert {str(p.relative_to(root)): urls for p in files if (urls := outside_fetches(p))} == {}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//cdn.example/x.css">'),
        ("a.css", '@import "https://fonts.example/a.css";'),
        ("a.css", "a { background: url(//img.example/a.png) }"),
        ("a.js", 'import x from "https://cdn.example/x.js";'),
        ("a.js", "fetch(`https://api.example/v1`)"),
    ],
)
def test_the_check_for_outside_fetches_finds_them(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    assert len(outside_fetches(path)) == 1


def test_the_check_for_outside_fetches_lets_links_pass(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text('<a href="https://example.org/">there</a><script src="/static/a.js"></script>', encoding="utf-8")
    assert outside_fetches(path) == []


def test_the_pins_name_versions_only_and_no_place_to_get_them_from(root: Path) -> None:
    pins = [line for line in (root / "constraints.txt").read_text(encoding="utf-8").splitlines() if line[0] != "#"]
    assert [line for line in pins if not re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", line)] == []
    assert '"resolved"' not in (root / "static/package-lock.json").read_text(encoding="utf-8")
