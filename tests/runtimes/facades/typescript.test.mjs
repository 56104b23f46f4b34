// examples/typescript on Node: its route handlers as Next.js calls them, and its own jobs over @upstash/redis.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { test } from "node:test";
import { Readable } from "node:stream";

const here = process.env.EXAMPLE;
const { connect, Queue } = await import(`${here}/lib/outlast.ts`);
const { ENQUEUE } = await import(`${here}/lib/scripts.generated.ts`);
const passing = await import(`${here}/app/api/outlast/[...path]/route.ts`);
const generating = await import(`${here}/app/api/generate/route.ts`);
const { AbstractChat, DefaultChatTransport } = await import("ai7");
const { EventSource } = await import("eventsource");

/** What Next.js does: a Request in, a Response out, its body as it comes; a body that fails breaks the connection. */
const server = createServer(async (incoming, outgoing) => {
  const leaving = new AbortController();
  outgoing.on("close", () => leaving.abort());
  const body = incoming.method === "POST" ? Readable.toWeb(incoming) : undefined;
  const url = `http://${incoming.headers.host}${incoming.url}`;
  const { method, headers } = incoming;
  const request = new Request(url, { method, headers, body, duplex: "half", signal: leaving.signal });
  const route = incoming.url.startsWith("/api/generate") ? generating : passing;
  try {
    const response = await route[method](request);
    outgoing.writeHead(response.status, Object.fromEntries(response.headers));
    outgoing.flushHeaders();
    if (response.body) for await (const chunk of response.body) outgoing.write(chunk);
    outgoing.end();
  } catch {
    outgoing.destroy();
  }
});
await new Promise((done) => server.listen(0, "127.0.0.1", done));
const site = `http://127.0.0.1:${server.address().port}`;
const ann = { cookie: "user=ann" };
const queue = new Queue(connect(), "generate");
const as = (name, path, init = {}) => fetch(site + path, { ...init, headers: { ...init.headers, cookie: `user=${name}` } });

async function ended(id) {
  for (;;) {
    const job = await queue.get(id);
    if (["completed", "failed", "cancelled"].includes(job.status)) return job;
    await new Promise((done) => setTimeout(done, 20));
  }
}

test.after(() => server.close());

test("a job made in TypeScript is run by the Python worker", async () => {
  const { id, deduplicated } = await queue.enqueue({ prompt: "héllo “wörld” 🎉" }, { owner: "ann" });
  assert.equal(deduplicated, false);
  const job = await ended(id);
  assert.deepEqual({ ...job }, { status: "completed", result: "héllo “wörld” 🎉 ", error: null, attempt: 1, owner: "ann" });
});

test("a payload of 100 kB", async () => {
  const { id } = await queue.enqueue({ prompt: "ü".repeat(50_000) }, { id: "large", idempotencyKey: "large" });
  assert.equal((await ended(id)).result, `${"ü".repeat(50_000)} `);
});

test("the server learns the script by the first call", async () => {
  const redis = connect();
  await redis.scriptFlush();
  const { id } = await queue.enqueue({ prompt: "x" });
  assert.equal((await ended(id)).status, "completed");
  assert.deepEqual(await redis.scriptExists(ENQUEUE.sha), [1]);
});

test("the same key is the same job, an own id is used again once its job has ended", async () => {
  const first = await queue.enqueue({ prompt: "one" }, { idempotencyKey: "k" });
  const second = await queue.enqueue({ prompt: "one" }, { idempotencyKey: "k" });
  assert.deepEqual(second, { id: first.id, deduplicated: true });
  const id = "1234567890123456789012";
  await queue.enqueue({ prompt: "a b c d e f" }, { id });
  await assert.rejects(queue.enqueue({ prompt: "b" }, { id }), /is still/);
  assert.equal((await ended(id)).result, "a b c d e f ");
  assert.deepEqual(await queue.enqueue({ prompt: "again" }, { id }), { id, deduplicated: false });
  assert.equal((await ended(id)).result, "again ");
});

test("delay and cancel", async () => {
  const late = await queue.enqueue({ prompt: "late" }, { delay: 0.4 });
  assert.equal((await queue.get(late.id)).status, "scheduled");
  assert.equal((await ended(late.id)).status, "completed");
  const never = await queue.enqueue({ prompt: "never" }, { delay: 3600 });
  assert.equal(await queue.cancel(never.id), true);
  assert.equal((await queue.get(never.id)).status, "cancelled");
  const long = await queue.enqueue({ prompt: "word ".repeat(500) });
  while ((await queue.get(long.id)).status !== "active") await new Promise((done) => setTimeout(done, 20));
  assert.equal(await queue.cancel(long.id), true);
  assert.equal((await ended(long.id)).status, "cancelled");
  assert.equal(await queue.cancel(late.id), false);
  assert.equal(await queue.cancel("unknown"), false);
});

test("made by a route of TypeScript, watched through the edge", async () => {
  const headers = { "content-type": "application/json", "idempotency-key": "click-1" };
  const body = JSON.stringify({ prompt: "watched by a browser" });
  const made = await as("ann", "/api/generate", { method: "POST", headers, body });
  assert.equal(made.status, 202);
  const job = await made.json();
  const again = await as("ann", "/api/generate", { method: "POST", headers, body });
  assert.equal((await again.json()).id, job.id);
  let text = "";
  await new Promise((done, failed) => {
    const source = new EventSource(site + job.events_url, {
      fetch: (url, init) => fetch(url, { ...init, headers: { ...init.headers, ...ann } }),
    });
    source.addEventListener("chunk", ({ data }) => (text += JSON.parse(data).text));
    source.addEventListener("completed", ({ data }) => {
      source.close();
      done(assert.equal(JSON.parse(data).result, text));
    });
    source.onerror = ({ code }) => code && failed(new Error(`refused with ${code}`));
  });
  assert.equal(text, "watched by a browser ");
  assert.equal((await as("bob", job.url)).status, 404);
  assert.equal((await fetch(site + job.url)).status, 401);
  const kept = await as("ann", job.url);
  const etag = kept.headers.get("etag");
  assert.equal((await as("ann", job.url, { headers: { "if-none-match": etag } })).status, 304);
});

test("the edge's own routes: made, cancelled, ids with a slash", async () => {
  const headers = { "content-type": "application/json" };
  const body = JSON.stringify({ payload: { prompt: "word ".repeat(500) } });
  const made = await as("ann", "/api/outlast/v1/queues/generate/jobs", { method: "POST", headers, body });
  assert.equal(made.status, 202);
  const { id } = await made.json();
  assert.equal(made.headers.get("location"), `/api/outlast/v1/queues/generate/jobs/${id}`);
  const cancelled = await as("ann", `${made.headers.get("location")}/cancel`, { method: "POST" });
  assert.equal((await cancelled.json()).cancelled, true);
  await queue.enqueue({ prompt: "x" }, { id: "a/b", owner: "ann" });
  assert.equal((await as("ann", "/api/outlast/v1/queues/generate/jobs/a%2Fb")).status, 200);
});

class State {
  status = "ready";
  error = undefined;
  messages = [];
  pushMessage = (message) => (this.messages = this.messages.concat(message));
  popMessage = () => (this.messages = this.messages.slice(0, -1));
  replaceMessage = (index, message) => (this.messages = this.messages.with(index, this.snapshot(message)));
  snapshot = (value) => structuredClone(value);
}

class Chat extends AbstractChat {
  constructor(init) {
    super({ ...init, state: new State() });
  }
}

test("useChat through the route handlers; an end that is none breaks off there too", async () => {
  const transport = new DefaultChatTransport({ api: `${site}/api/outlast/api/chat`, headers: ann });
  const chat = new Chat({ id: "proxied", transport });
  const text = Array.from({ length: 40 }, (_, n) => `word${n}`).join(" ");
  await chat.sendMessage({ text }); // the edge's max_stream is over before the answer is
  let resumed = 0;
  for (; chat.status === "error" && resumed < 20; resumed++) await chat.resumeStream();
  assert.ok(resumed > 0, "it was cut off");
  assert.equal(chat.status, "ready");
});
