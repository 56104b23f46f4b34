// The AI SDK's own provider for OpenAI, in the browser's place: server code that calls a job like a model.
import assert from "node:assert/strict";
import { test } from "node:test";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai7";

const TOKENS = ["Every ", "answer ", "outlasts."];
const openai = createOpenAI({ baseURL: `${process.env.URL}/v1`, apiKey: "k" });
const prompt = (script) => JSON.stringify({ tokens: TOKENS, ...script });

test("responses and chat, whole and streamed", async () => {
  for (const model of [openai.responses("any"), openai.chat("any")]) {
    assert.equal((await generateText({ model, prompt: prompt() })).text, TOKENS.join(""));
    const stream = streamText({ model, prompt: prompt({ pause: 0.02 }) });
    let text = "";
    for await (const delta of stream.textStream) text += delta;
    assert.equal(text, TOKENS.join(""));
    assert.equal(await stream.finishReason, "stop");
  }
});
