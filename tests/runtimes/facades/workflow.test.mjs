// The official transport that reconnects by itself, unmodified: it counts chunks.
import assert from "node:assert/strict";
import { test } from "node:test";
import { WorkflowChatTransport } from "@ai-sdk/workflow/client";

console.error = () => {}; // it tells of every cut

const TOKENS = ["Every ", "answer ", "out", "lasts ", "its ", "request."];
const TEXT = TOKENS.join("");

async function answer({ cut, id, api = "/api/chat", ...script }) {
  let requests = 0;
  const transport = new WorkflowChatTransport({
    api: process.env.URL + api,
    fetch: (url, init) => {
      requests++;
      return fetch(url, { ...init, headers: { ...init?.headers, ...(cut && { "x-cut": cut }) } });
    },
    maxConsecutiveErrors: 1000,
  });
  const text = JSON.stringify({ tokens: TOKENS, ...script });
  const messages = [{ id: "u", role: "user", parts: [{ type: "text", text }] }];
  const stream = await transport.sendMessages({ chatId: "c", messages, trigger: "submit-message" });
  const chunks = [];
  for await (const chunk of stream) chunks.push(chunk);
  assert.equal(chunks.at(-1).type, "finish");
  const from = chunks.findLastIndex(({ type }) => type === "data-outlast-restarted" || type === "reset-step") + 1;
  const shown = chunks.slice(from).filter(({ type }) => type === "text-delta").map(({ delta }) => delta).join("");
  return { shown, requests, chunks };
}

for (const how of ["", " clean"]) {
  test(`cut after every n${how}, over and over`, async () => {
    await Promise.all(
      [1, 2, 3, 4, 5, 8].map(async (n) => {
        const { shown, requests } = await answer({ cut: n + how, pause: 0.02 });
        assert.equal(shown, TEXT, `cut after ${n}`);
        assert.ok(requests > 1);
      }),
    );
  });
}

test("cut after every n, restarted at every n", async () => {
  for (const n of [1, 2, 3, 5]) {
    await Promise.all(
      [0, 1, 2, 4, 6].flatMap((fails) =>
        ["/api/chat", "/api/reset"].map(async (api) => {
          const { shown } = await answer({ api, cut: `${n} clean`, fails: [fails, 1], pause: 0.01 });
          assert.equal(shown, TEXT, `cut after ${n}, restarted after ${fails}, ${api}`);
        }),
      ),
    );
  }
});

test("a failure ends it", async () => {
  const { chunks } = await answer({ end: "fail" });
  assert.deepEqual(chunks.slice(-2).map(({ type }) => type), ["error", "finish"]);
});
