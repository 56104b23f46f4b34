// A person with the page of examples/chat in a real Chromium. It prints what is to be killed.
import assert from "node:assert/strict";
import { chromium } from "playwright-core";

const { URL, CHROMIUM, PICTURES } = process.env;
const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu"] });
const complaints = [];

async function open(context, url = URL) {
  const page = await context.newPage();
  page.setDefaultTimeout(10000);
  page.on("pageerror", (error) => complaints.push(String(error)));
  await page.goto(url);
  await page.waitForSelector("form");
  return page;
}

const context = (options) => browser.newContext({ viewport: { width: 800, height: 600 }, ...options });
const whole = (question) =>
  `You said: “${question}”. ${Array.from({ length: 30 }, (_, n) => `word${n + 1} `).join("")}Done.`;
const items = (page) => page.$$eval("li", (list) => list.map((item) => item.textContent));
const last = async (page) => (await items(page)).at(-1);
const sees = (page, text) =>
  page.waitForFunction((text) => [...document.querySelectorAll("li")].at(-1)?.textContent.includes(text), text);
const idle = (page) => page.waitForSelector('main[data-status="ready"]');

async function ask(page, question) {
  await page.fill("input", question);
  await page.keyboard.press("Enter");
}

const people = {
  async "reloads in the middle of the answer, and after it"() {
    const page = await open(await context());
    await ask(page, "one");
    await sees(page, "word5");
    await page.reload();
    await sees(page, "Done.");
    assert.deepEqual(await items(page), ["one", whole("one")]);
    await idle(page);
    await page.reload();
    await sees(page, "Done.");
    await idle(page);
    assert.deepEqual(await items(page), ["one", whole("one")], "nothing twice");
    await page.screenshot({ path: `${PICTURES}/reloaded.png` });
  },

  async "opens a second tab"() {
    const home = await context();
    const page = await open(home);
    await ask(page, "two");
    await sees(page, "word3");
    const second = await open(home, page.url());
    await sees(second, "word6");
    await Promise.all([sees(page, "Done."), sees(second, "Done.")]);
    assert.equal(await last(page), whole("two"));
    assert.deepEqual(await items(second), ["two", whole("two")]);
  },

  async "closes the page and comes back when the answer is done"() {
    const home = await context();
    const page = await open(home);
    await ask(page, "three");
    await sees(page, "word2");
    const url = page.url();
    await page.close();
    await new Promise((done) => setTimeout(done, 3000));
    const back = await open(home, url);
    await sees(back, "Done.");
    assert.deepEqual(await items(back), ["three", whole("three")]);
  },

  async "stops it, and asks something else"() {
    const page = await open(await context());
    await ask(page, "four");
    await sees(page, "word4");
    await page.click("text=Stop");
    await idle(page);
    const stopped = await last(page);
    assert.ok(stopped.includes("word4") && !stopped.includes("Done."));
    await ask(page, "five");
    await sees(page, "Done.");
    assert.deepEqual(await items(page), ["four", stopped, "five", whole("five")]);
  },

  async "has the web server killed and started again"() {
    const page = await open(await context());
    await ask(page, "six");
    await sees(page, "word3");
    console.log("KILL WEB");
    await page.waitForSelector('p[role="status"]');
    await sees(page, "Done.");
    assert.deepEqual(await items(page), ["six", whole("six")]);
  },

  async "has a stranger look in"() {
    const page = await open(await context());
    await ask(page, "mine");
    await sees(page, "word3");
    const stranger = await open(await context(), page.url());
    await idle(stranger);
    await new Promise((done) => setTimeout(done, 300));
    assert.deepEqual(await items(stranger), []);
  },

  async "has the worker killed under the answer"() {
    const page = await open(await context({ colorScheme: "dark", viewport: { width: 390, height: 700 } }));
    await ask(page, "seven");
    await sees(page, "word8");
    console.log("KILL WORKER");
    await sees(page, "Done.");
    await page.screenshot({ path: `${PICTURES}/killed.png` });
    assert.equal(await last(page), whole("seven"));
    const parts = await page.evaluate(() => JSON.parse(localStorage.getItem(location.hash.slice(1))).at(-1).parts);
    assert.ok(parts.some((part) => part.type === "data-outlast-restarted"), "it did start over");
  },
};

for (const [name, act] of Object.entries(people)) {
  try {
    await act();
  } catch (error) {
    console.error(`a person ${name}:`, error);
    process.exitCode = 1;
  }
}
assert.deepEqual(complaints, []);
await browser.close();
