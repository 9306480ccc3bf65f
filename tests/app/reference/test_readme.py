"""The tables of fields and endpoints name what is there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from app.openai_api import responses_api, schemas
from app.reference.document import openapi_document
from app.routes import ROUTES, route_table

DOCUMENT: Any = openapi_document(route_table(is_loopback=True))
COLUMNS = {
    "chat": "ChatBody",
    "completions": "CompletionBody",
    "responses": "ResponsesBody",
    "messages": "MessagesBody",
}


@pytest.fixture(scope="module")
def readme(root: Path) -> str:
    return (root / "app/openai_api/README.md").read_text(encoding="utf-8")


def rows(readme: str) -> list[list[str]]:
    """The table of fields without its head: cells of each row."""
    table = readme.partition("| fields |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_every_field_is_in_the_table_with_the_apis_that_take_it(readme: str) -> None:
    names = list(COLUMNS)
    wrong = []
    seen: set[tuple[str, str]] = set()
    for cells in rows(readme):
        fields = [name for name in re.findall(r"`(\w+)`", cells[0]) if any(name in fields_of(api) for api in names)]
        assert fields, cells
        for api, cell in zip(names, cells[1:5], strict=True):
            for field in fields:
                is_there = field in fields_of(api)
                if field == "stream_options" and cell == "always":
                    continue
                told = cell == "✓" or f"`{field}`" in cell
                if is_there != told and "as `" not in cell:
                    wrong.append((field, api, cell))
                seen.add((api, field))
                seen.update((api, name) for name in re.findall(r"`(\w+)`", cell))
    assert wrong == []
    missing = [(api, field) for api in names for field in fields_of(api) if (api, field) not in seen]
    assert missing == []


def fields_of(api: str) -> set[str]:
    return set(DOCUMENT["components"]["schemas"][COLUMNS[api]]["properties"])


def test_every_refused_field_is_named(readme: str) -> None:
    refused = {*schemas._UNSUPPORTED, *responses_api._UNSUPPORTED} - {"truncation", "guided_whitespace_pattern"}
    assert {name for name in refused if f"`{name}`" not in readme} == set()


def test_every_endpoint_of_this_package_is_named(readme: str) -> None:
    paths = {
        row.path.partition("{")[0].rstrip("/") for row in ROUTES if row.handler.__module__ == "app.openai_api.routes"
    }
    assert len(paths) > 10
    assert {path for path in paths if path not in readme} == set()
