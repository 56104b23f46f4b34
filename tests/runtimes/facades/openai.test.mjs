// The OpenAI SDK that $OPENAI names, unmodified.
import assert from "node:assert/strict";
import { test } from "node:test";

const { default: OpenAI } = await import(process.env.OPENAI);
const TOKENS = ["Every ", "answer ", "out", "lasts ", "its ", "request."];
const TEXT = TOKENS.join("");

const open = (options) => new OpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "k", maxRetries: 0, ...options });
const ask = (script) => ({ model: "any", input: JSON.stringify({ tokens: TOKENS, ...script }), background: true });
const client = open();

async function follow(id, { cut, last = -1, items = new Map() }) {
  const options = cut ? { headers: { "x-cut": cut } } : {};
  for (let requests = 0; ; ) {
    try {
      requests++;
      const stream = await client.responses.retrieve(id, { stream: true, starting_after: last }, options);
      for await (const event of stream) {
        assert.ok(event.sequence_number > last);
        last = event.sequence_number;
        if (event.type === "response.output_item.added") items.set(event.item.id, "");
        if (event.type === "response.output_text.delta") {
          items.set(event.item_id, items.get(event.item_id) + event.delta);
        }
        if (event.type === "response.completed") return { text: [...items.values()].at(-1), requests, event };
      }
    } catch (error) {
      if (!/terminated|aborted|connection/i.test(`${error.message} ${error.cause?.message}`)) throw error;
    }
  }
}

test("created in the background, polled", async () => {
  const made = await client.responses.create(ask({ pause: 0.02 }));
  assert.match(made.status, /queued|in_progress/);
  let now = made;
  while (now.status === "queued" || now.status === "in_progress") now = await client.responses.retrieve(made.id);
  assert.equal(now.status, "completed");
  assert.equal(now.output_text, TEXT);
});

test("cut after every n and restarted at every n: resumed by its sequence number", async () => {
  await Promise.all(
    [1, 2, 3, 5].flatMap((cut) =>
      [[], [0], [1], [3], [6], [2, 4]].map(async (fails) => {
        const { id } = await client.responses.create(ask({ fails, pause: 0.01 }));
        const { text, requests, event } = await follow(id, { cut: String(cut) });
        assert.equal(text, TEXT, `cut after ${cut}, fails ${fails}`);
        assert.equal(event.response.output.at(-1).content[0].text, TEXT);
        assert.ok(requests > 1);
      }),
    ),
  );
});

test("the SDK's accumulator, live over restarts and resumed by id", async () => {
  for (const fails of [[], [2], [1, 3]]) {
    const live = client.responses.stream(ask({ fails, pause: 0.01 }));
    const numbers = [];
    let id;
    for await (const event of live) {
      id ??= event.response.id;
      numbers.push(event.sequence_number);
    }
    const final = await live.finalResponse();
    assert.equal(final.output_text, TEXT);
    for (const after of numbers.slice(0, -1)) {
      const resumed = client.responses.stream({ response_id: id, starting_after: after });
      for await (const event of resumed) assert.ok(event.sequence_number > after);
      assert.equal((await resumed.finalResponse()).output_text, TEXT);
    }
  }
});

test("cancel", async () => {
  const { id } = await client.responses.create(ask({ pause: 1 }));
  assert.equal((await client.responses.cancel(id)).status, "cancelled");
  assert.equal((await client.responses.cancel(id)).status, "cancelled");
  const events = [];
  for await (const event of await client.responses.retrieve(id, { stream: true })) events.push(event);
  assert.equal(events.at(-1).type, "response.incomplete");
  assert.equal(events.at(-1).response.status, "cancelled");
});

test("a failure", async () => {
  const events = [];
  for await (const event of await client.responses.create({ ...ask({ end: "fail" }), stream: true })) events.push(event);
  assert.equal(events.at(-1).type, "response.failed");
  assert.equal(events.at(-1).response.error.message, "The job failed.");
});

test("a request whose answer is lost is repeated by the SDK and finds its job", async () => {
  const retrying = open({ maxRetries: 2, defaultHeaders: { "x-lose": "1" } });
  const body = ask({ tokens: [`${Math.random()}`], pause: 0.3 });
  const made = await retrying.responses.create(body);
  assert.ok(Date.now() / 1000 - made.created_at < 30);
  const repeat = await open({ defaultHeaders: { "x-stainless-retry-count": "1" } }).responses.create(body);
  assert.equal(repeat.id, made.id);
});

test("errors are the SDK's own", async () => {
  await assert.rejects(client.responses.retrieve("resp_chat_unknown"), OpenAI.NotFoundError);
  await assert.rejects(client.responses.create({ model: 3, input: "" }), OpenAI.NotFoundError);
});

test("chat completions, plain and streamed, over a restart that says the same", async () => {
  for (const fails of [[], [3], [2, 5]]) {
    const body = { model: "any", messages: [{ role: "user", content: ask({ fails, pause: 0.01 }).input }] };
    const plain = await client.chat.completions.create(body);
    assert.equal(plain.choices[0].message.content, TEXT);
    let text = "";
    for await (const chunk of await client.chat.completions.create({ ...body, stream: true })) {
      text += chunk.choices[0]?.delta.content ?? "";
    }
    assert.equal(text, TEXT);
    const runner = client.chat.completions.stream(body);
    assert.equal(await runner.finalContent(), TEXT);
  }
});
