// useChat's core (AbstractChat + DefaultChatTransport) of the AI SDK that $AI names, unmodified.
import assert from "node:assert/strict";
import { test } from "node:test";

const { AbstractChat, DefaultChatTransport } = await import(process.env.AI);
const V7 = process.env.AI === "ai7";
const TOKENS = ["Every ", "answer ", "out", "lasts ", "its ", "request."];
const TEXT = TOKENS.join("");
let chats = 0;

class State {
  status = "ready";
  error = undefined;
  constructor(messages) {
    this.messages = messages;
  }
  pushMessage = (message) => (this.messages = this.messages.concat(message));
  popMessage = () => (this.messages = this.messages.slice(0, -1));
  replaceMessage = (index, message) => (this.messages = this.messages.with(index, this.snapshot(message)));
  snapshot = (value) => structuredClone(value);
}

class Chat extends AbstractChat {
  constructor({ messages = [], ...init }) {
    super({ ...init, state: new State(messages) });
  }
}

function open({ id = `${process.env.AI}-${process.pid}-${chats++}`, api = "/api/chat", headers, ...init } = {}) {
  return new Chat({ id, transport: new DefaultChatTransport({ api: process.env.URL + api, headers }), ...init });
}

const script = (more) => ({ text: JSON.stringify({ tokens: TOKENS, ...more }) });

/** What a page shows: the parts after the last restart. */
function shown(chat) {
  const parts = chat.lastMessage.parts;
  const from = parts.findLastIndex((part) => part.type === "data-outlast-restarted") + 1;
  return parts.slice(from).filter((part) => part.type === "text").map((part) => part.text).join("");
}

const until = async (condition) => {
  for (let n = 0; n < 1000 && !condition(); n++) await new Promise((done) => setTimeout(done, 10));
  assert.ok(condition());
};

test("a message is answered", async () => {
  const chat = open();
  await chat.sendMessage(script());
  assert.equal(chat.status, "ready");
  assert.equal(shown(chat), TEXT);
  assert.equal(chat.messages.length, 2);
  await chat.sendMessage(script({ tokens: ["Yes."] }));
  assert.equal(shown(chat), "Yes.");
  assert.equal(chat.messages.length, 4);
});

test("reasoning and tools pass through, in their order", async () => {
  const chat = open();
  const tokens = [
    { type: "reasoning-start", id: "r" },
    { type: "reasoning-delta", id: "r", delta: "Hm." },
    { type: "reasoning-end", id: "r" },
    "Let me look. ",
    { type: "tool-input-available", toolCallId: "t", toolName: "look", input: { at: "it" } },
    { type: "tool-output-available", toolCallId: "t", output: { found: 3 } },
    { type: "source-url", sourceId: "s", url: "https://example.com/" },
    { type: "data-weather", data: { degrees: 3 } },
    { any: "value" },
    "Three.",
  ];
  await chat.sendMessage(script({ tokens, result: null }));
  assert.equal(chat.status, "ready", chat.error);
  const kinds = chat.lastMessage.parts.map((part) => part.type);
  assert.deepEqual(kinds, [
    "step-start", "reasoning", "text", "tool-look", "source-url", "data-weather", "data-outlast", "text",
  ]);
  assert.deepEqual(chat.lastMessage.parts[3].output, { found: 3 });
});

test("cut after every n: the page resumes and shows the whole answer", async () => {
  await Promise.all(
    Array.from({ length: 14 }, async (_, n) => {
      const chat = open({ api: "/api/replay", headers: () => ({ "x-cut": String(n) }) });
      const whole = open({ api: "/api/replay", id: chat.id });
      await chat.sendMessage(script({ pause: 0.03 }));
      if (chat.status === "ready") {
        assert.ok(n > 10, `cut after ${n} passed for an answer`);
        return;
      }
      whole.messages = chat.messages;
      await whole.resumeStream();
      assert.equal(shown(whole), TEXT, `cut after ${n}`);
      assert.equal(whole.status, "ready");
      assert.equal(whole.messages.length, 2, "no message appears twice");
    }),
  );
});

test("restart at every n, and twice", async () => {
  const api = V7 ? ["/api/chat", "/api/reset"] : ["/api/chat"];
  await Promise.all(
    api.flatMap((api) =>
      Array.from({ length: TOKENS.length + 1 }, async (_, n) => {
        for (const fails of [[n], [n, 2]]) {
          const chat = open({ api });
          await chat.sendMessage(script({ fails, pause: 0.01 }));
          assert.equal(chat.status, "ready", chat.error);
          assert.equal(shown(chat), TEXT, `${api} ${fails}`);
          if (api === "/api/reset") {
            assert.deepEqual(chat.lastMessage.parts.map((part) => part.type), ["step-start", "text"]);
          }
        }
      }),
    ),
  );
});

test("a second tab, or the page after a refresh, has the answer from its start", async () => {
  const first = open();
  const sent = first.sendMessage(script({ pause: 0.1 }));
  await until(() => first.lastMessage?.parts.some((part) => part.text?.includes("out")));
  const second = open({ id: first.id, messages: [first.messages[0]] });
  await Promise.all([second.resumeStream(), sent]);
  assert.equal(shown(first), TEXT);
  assert.equal(shown(second), TEXT);
  assert.equal(first.lastMessage.id, second.lastMessage.id);
  const late = open({ id: first.id, messages: structuredClone(first.messages) });
  await late.resumeStream();
  assert.equal(late.status, "ready");
  assert.deepEqual(late.messages, first.messages);
});

test("the client's stop leaves the job alone, the stop route ends it", async () => {
  const chat = open();
  const sent = chat.sendMessage(script({ pause: 0.2 }));
  await until(() => chat.lastMessage?.parts.some((part) => part.text));
  await chat.stop();
  await sent;
  const resumed = open({ id: chat.id, messages: [chat.messages[0]] });
  const answer = resumed.resumeStream();
  await until(() => resumed.lastMessage?.parts.some((part) => part.text));
  const reply = await fetch(`${process.env.URL}/api/chat/${chat.id}/stop`, { method: "POST" });
  assert.deepEqual(await reply.json(), { success: true });
  await answer;
  assert.equal(resumed.status, "ready");
  assert.notEqual(shown(resumed), TEXT);
  assert.equal((await fetch(`${process.env.URL}/api/chat/${chat.id}/stream`)).status, 204);
  await resumed.sendMessage(script({ tokens: ["Next."] }));
  assert.equal(shown(resumed), "Next.");
});

test("a failure is an error without its details", async () => {
  const errors = [];
  const chat = open({ onError: (error) => errors.push(error.message) });
  await chat.sendMessage(script({ end: "fail" }));
  assert.equal(chat.status, "error");
  assert.deepEqual(errors, ["The job failed."]);
  await chat.regenerate();
  assert.equal(chat.status, "error");
});

test("a refusal's text is the error's", async () => {
  const chat = open({ api: "/api/chat", headers: { "idempotency-key": " " } });
  await chat.sendMessage(script());
  assert.match(chat.error.message, /Idempotency-Key takes one key/);
});
