"""Each statement of the page of guarantees names tests, and they are there."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "guarantees.md"


def rows() -> list[tuple[str, str]]:
    cells = [line.strip("| ").split(" | ") for line in PAGE.read_text(encoding="utf-8").splitlines() if line[:1] == "|"]
    assert all(len(row) == 2 for row in cells)
    return [(row[0], row[1]) for row in cells if row[0] != "Statement" and set(row[0]) != {"-"}]


def test_every_statement_names_a_test_that_exists() -> None:
    assert len(rows()) > 30
    for statement, named in rows():
        for test in named.split(", "):
            file, _, name = test.strip("`").partition("::")
            functions = {
                node.name
                for node in ast.walk(ast.parse((TESTS / file).read_text(encoding="utf-8")))
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            }
            assert name in functions, statement


def test_nothing_is_promised_outside_of_the_tables() -> None:
    said = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line and line[0] not in "#|"]
    assert len(said) == 2, "the introduction"
