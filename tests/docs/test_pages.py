"""The blocks of some pages, run in their order: Python in one namespace a page, commands as they are typed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = ("bulk", "schedules")
BLOCK = re.compile(r"```(python|bash)\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize("page", PAGES)
def test_every_block_runs_as_it_stands(
    page: str, valkey_url: str, queue_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in list(os.environ):
        if name.startswith(("OUTLAST_", "UPSTASH_", "KV_REST_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("REDIS_URL", valkey_url)
    monkeypatch.setenv("OUTLAST_NAMESPACE", queue_name)  # other tests use the server, too
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"])
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = BLOCK.findall(text)
    assert blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for kind, body in blocks:
        if kind == "python":
            exec(compile(body, f"{page}.md", "exec"), namespace)
        else:
            done = subprocess.run(["bash", "-euc", body], capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, done.stderr
