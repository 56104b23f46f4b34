"""What is derived from the code: the scripts that the TypeScript example carries, and the page about the facades."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

from outlast.protocol import calls
from outlast.protocol.scripts import SCRIPTS

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "typescript" / "lib" / "scripts.generated.ts"


def test_the_generated_file_is_current() -> None:
    generate = runpy.run_path(str(ROOT / "scripts" / "typescript"))["generate"]
    assert FILE.read_text(encoding="utf-8") == generate(), "run scripts/digests"


def test_it_names_the_scripts_as_the_clients_call_them() -> None:
    assert calls.enqueue, "the calls register their scripts"
    digests = re.findall(r'"sha": "(\w+)"', FILE.read_text(encoding="utf-8"))
    assert digests == [SCRIPTS["enqueue"].sha, SCRIPTS["cancel"].sha]


def test_the_block_of_the_manual_runs() -> None:
    page = (ROOT / "docs" / "facades.md").read_text(encoding="utf-8")
    [block] = [body for body in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "Starlette(" in body]
    made: dict[str, Any] = {}
    exec(block, made)
    paths = {route.path for route in made["app"].routes}
    for path in ("/api/chat", "/v1/responses", "/v1/responses/{id}/cancel"):
        assert path in paths
