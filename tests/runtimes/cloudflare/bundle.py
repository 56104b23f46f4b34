"""The Pyodide bundle of workerd, built from the npm package `pyodide`.

workerd fetches this file from Cloudflare and checks its digest; with the compatibility flag
`python_workers_development` it takes `pyodide_dev.capnp.bin` from its cache folder as it is. The file is one Cap'n
Proto message: a list of modules. What the edits below name are internals of one release of workerd, so workerd and
pyodide are pinned together in package.json.
"""

from __future__ import annotations

import struct
from pathlib import Path

NAME = "pyodide_dev.capnp.bin"

# workerd compiles no WebAssembly and gives no entropy while a Worker starts, and loads libraries its own way: the
# places where Pyodide's loader would do it itself call the functions of workerd's module instead.
_HELPERS = "pyodide-internal:builtin_wrappers"
_EDITS = (
    ("new WebAssembly.Module", "newWasmModule"),
    ("WebAssembly.instantiate", "wasmInstantiate"),
    ("crypto.getRandomValues(", "getRandomValues(Module,"),
    (
        "function loadLibData(){",
        "function loadLibData(){const data=patchedLoadLibData(Module,libName,flags.rpath);"
        "return flags.loadAsync?Promise.resolve(data):data}function theirLoadLibData(){",
    ),
    ("getMemory(", "Module.getMemoryPatched(Module,libName,"),
    (
        "export default _createPyodideModule;",
        f'import {{newWasmModule,wasmInstantiate,getRandomValues,patchedLoadLibData}} from "{_HELPERS}";'
        "export default _createPyodideModule;export {_createPyodideModule};",
    ),
)

_WORD = 8
_SOURCE, _WASM, _DATA = 0, 1, 2


def build(pyodide: Path, folder: Path) -> Path:
    """Write the bundle of the package in `pyodide` into `folder`."""
    loader = (pyodide / "pyodide.asm.mjs").read_text(encoding="utf-8")
    for theirs, ours in _EDITS:
        assert theirs in loader, f"pyodide.asm.mjs has no {theirs!r}: another release of Pyodide needs other edits"
        loader = loader.replace(theirs, ours)
    modules = [
        ("pyodideRuntime-internal:pyodide.asm", _SOURCE, loader.encode()),
        ("pyodideRuntime-internal:pyodide.asm.wasm", _WASM, (pyodide / "pyodide.asm.wasm").read_bytes()),
        ("pyodideRuntime-internal:python_stdlib.zip", _DATA, (pyodide / "python_stdlib.zip").read_bytes()),
    ]
    folder.mkdir(parents=True, exist_ok=True)
    bundle = folder / NAME
    bundle.write_bytes(_message(modules))
    return bundle


def _message(modules: list[tuple[str, int, bytes]]) -> bytes:
    """One segment: the root (one pointer), its list of modules, then the texts that they point to.

    A module is one word (the kind of its content, internal) and four pointers, of which the first two, name and
    content, are set. Pointers count in words from their own end.
    """
    size = 5
    segment = bytearray()
    segment += struct.pack("<iHH", 0, 0, 1)  # root: a struct here, no data words, one pointer
    segment += struct.pack("<iI", 1, 7 | len(modules) * size << 3)  # a composite list follows, so many words
    segment += struct.pack("<iHH", len(modules) << 2, 1, 4)  # of so many structs: one data word, four pointers
    first = len(segment)
    segment += bytes(len(modules) * size * _WORD)
    for index, (name, kind, content) in enumerate(modules):
        at = first + index * size * _WORD
        struct.pack_into("<HH", segment, at, 2, kind)
        for slot, text in ((1, name.encode() + b"\0"), (2, content)):
            pointer = at + slot * _WORD
            distance = (len(segment) - pointer - _WORD) // _WORD
            struct.pack_into("<iI", segment, pointer, distance << 2 | 1, len(text) << 3 | 2)  # a list of bytes
            segment += text
            segment += bytes(-len(text) % _WORD)
    return struct.pack("<II", 0, len(segment) // _WORD) + bytes(segment)
