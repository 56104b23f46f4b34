"""`tests/typing` under both type checkers, strict: what is right passes, and each wrong line is refused.

In a file `*_wrong.py` a line that ends in "# refused" must have an error and no other line may.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted(path.relative_to(ROOT) for path in (ROOT / "tests/typing").glob("*.py"))


def mypy() -> dict[tuple[str, int], str]:
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--no-pretty", *map(str, FILES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found = re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE)
    return {(file, int(line)): text for file, line, text in found}


def pyright() -> dict[tuple[str, int], str]:
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", *map(str, FILES)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    found: dict[tuple[str, int], str] = {}
    for item in json.loads(done.stdout)["generalDiagnostics"]:
        if item["severity"] == "error":
            file = str(Path(item["file"]).relative_to(ROOT))
            found.setdefault((file, item["range"]["start"]["line"] + 1), item["message"])
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_typing_right_passes_and_wrong_is_refused_line_by_line(checker: str) -> None:
    assert FILES
    found = mypy() if checker == "mypy" else pyright()
    wanted: dict[str, set[int]] = defaultdict(set)
    for file in FILES:
        for number, line in enumerate((ROOT / file).read_text(encoding="utf-8").splitlines(), 1):
            if line.endswith("# refused"):
                assert file.stem.endswith("_wrong"), f"{file}:{number}"
                wanted[str(file)].add(number)
    missed = [f"{file}:{line}" for file, lines in wanted.items() for line in sorted(lines) if (file, line) not in found]
    unwanted = [f"{file}:{line} {text}" for (file, line), text in found.items() if line not in wanted[file]]
    assert (missed, unwanted) == ([], [])
