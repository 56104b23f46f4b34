// node pyodide.mjs PYODIDE FOLDER... MODULE: run MODULE's main() in Pyodide, with the folders on sys.path.
import { pathToFileURL } from "node:url";

const [pyodide, ...folders] = process.argv.slice(2);
const module = folders.pop();
const { loadPyodide } = await import(pathToFileURL(`${pyodide}/pyodide.mjs`).href);
const python = await loadPyodide({ env: { ...process.env, HOME: "/home/pyodide" } });
const path = python.pyimport("sys").path;
folders.forEach((folder, index) => {
  const there = `/folders/${index}`;
  python.FS.mkdirTree(there);
  python.FS.mount(python.FS.filesystems.NODEFS, { root: folder }, there);
  path.insert(0, there);
});
try {
  await python.pyimport(module).main();
} catch (error) {
  console.error(error.message);
  process.exit(1);
}
process.exit(0);
