"""A Worker's folder as `wrangler` would pack it, and the real `workerd` serving it."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Self

PYTHON = "3.14"
"""What compatibility dates from 2026-09-08 on run."""
PLATFORM = (
    *("--platform", "pyemscripten_2026_0_wasm32", "--python-version", PYTHON, "--implementation", "cp"),
    *("--abi", "cp314", "--abi", "none", "--no-compile"),
)
"""pip's options for it."""

PATIENCE = 60.0


def vendor(project: Path, sources: Iterable[Path]) -> None:
    """Fill `python_modules/`, as `pywrangler sync` does, with what lies in the folders `sources`."""
    target = project / "python_modules"
    for source in sources:
        shutil.copytree(
            source,
            target,
            dirs_exist_ok=True,
            ignore=shutil.ignore_patterns("__pycache__", "bin", "*.pyc"),
        )


def _modules(project: Path) -> list[str]:
    """The capnp text of all modules: our files are Python, vendored ones data, named from where Python looks."""
    ours = [(path, path.relative_to(project / "src"), "pythonModule") for path in (project / "src").rglob("*.py")]
    vendored = [
        (path, path.relative_to(project), "data") for path in (project / "python_modules").rglob("*") if path.is_file()
    ]
    ours.sort(key=lambda item: item[1].name != "entry.py")  # the first module is the entry point
    return [
        f'(name = "{name}", {kind} = embed "{path.relative_to(project)}")' for path, name, kind in [*ours, *vendored]
    ]


class Workerd:
    """A process of workerd that serves the Worker in `project` at `url`."""

    def __init__(self, binary: Path, bundles: Path, project: Path, bindings: Mapping[str, str]) -> None:
        self.logs: list[str] = []
        self._command = [
            *(binary, "serve", "--experimental", "--control-fd=1"),
            *("--pyodide-bundle-disk-cache-dir", bundles, project / "config.capnp"),
        ]
        texts = ", ".join(f"(name = {json.dumps(name)}, text = {json.dumps(text)})" for name, text in bindings.items())
        settings = json.loads(_without_comments((project / "wrangler.jsonc").read_text(encoding="utf-8")))
        flags = [*settings["compatibility_flags"], "python_workers_development"]
        (project / "config.capnp").write_text(
            f"""using Workerd = import "/workerd/workerd.capnp";
const config :Workerd.Config = (
  services = [
    (name = "main", worker = .worker),
    (name = "internet", network = (allow = ["local", "private"])),
  ],
  sockets = [(name = "http", address = "127.0.0.1:0", http = (), service = "main")],
);
const worker :Workerd.Worker = (
  modules = [{", ".join(_modules(project))}],
  bindings = [{texts}],
  compatibilityDate = "{settings["compatibility_date"]}",
  compatibilityFlags = {json.dumps(flags)},
);
""",
            encoding="utf-8",
        )

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        port: queue.Queue[int | None] = queue.Queue()
        self._readers = [
            threading.Thread(target=self._read_control, args=(port,), daemon=True),
            threading.Thread(target=self._read_logs, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        found = port.get(timeout=PATIENCE)
        assert found is not None, "workerd did not start:\n" + "".join(self.logs)
        self.url = f"http://127.0.0.1:{found}"
        return self

    def __exit__(self, *exc: object) -> None:
        self._process.kill()
        self._process.wait()
        for reader in self._readers:
            reader.join()

    def _read_control(self, port: queue.Queue[int | None]) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if '"listen"' in line:
                port.put(json.loads(line)["port"])
        port.put(None)
        self._process.stdout.close()

    def _read_logs(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.logs.append(line)
        self._process.stderr.close()


def _without_comments(text: str) -> str:
    """JSONC of which every comment has a line of its own."""
    return "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("//"))
