// The browser's side of the tests: one function a scenario, which prints what it saw as JSON.

import {chromium} from "playwright-core";
import {EventSource as NodeEventSource} from "eventsource";

const options = JSON.parse(process.argv[2]);
if (options.scenario === "launch") {
  // One browser for all scenarios: it says where it is and lives until our input ends.
  const server = await chromium.launchServer({
    executablePath: options.chromium,
    args: ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
      "--disable-component-update", "--disable-sync"],
  });
  console.log(server.wsEndpoint());
  for await (const _ of process.stdin);
  await server.close();
  process.exit();
}
const complaints = [];
const browser = await chromium.connect(options.browser);

async function open(settings = {}, context = null) {
  const home = context ?? await browser.newContext({viewport: {width: 1200, height: 800}, ...settings});
  const page = await home.newPage();
  page.setDefaultTimeout(20000);
  page.on("pageerror", (error) => complaints.push(String(error)));
  page.on("console", (message) => {
    if (message.type() === "error" && !options.tolerate?.some((text) => message.text().includes(text))) {
      complaints.push(message.text());
    }
  });
  await page.goto(options.url);
  return page;
}

async function ask(page, prompt) {
  await page.fill("#prompt", prompt);
  await page.keyboard.press("Enter");
}
const text = (page) => page.textContent("#answer");
const status = (page, wanted) =>
  page.waitForFunction((name) => document.getElementById("job").dataset.status === name, wanted);
const words = (page, count) =>
  page.waitForFunction((n) => document.getElementById("answer").textContent.split(" ").length > n, count);
const did = (page) => page.$$eval(".did", (items) => items.map((item) => item.dataset.dare));

// How often the answer got shorter, from now on.
const watchClears = (page) => page.evaluate(() => {
  window.clears = 0;
  let length = 0;
  const answer = document.getElementById("answer");
  new MutationObserver(() => {
    if (answer.textContent.length < length) window.clears += 1;
    length = answer.textContent.length;
  }).observe(answer, {childList: true, characterData: true, subtree: true});
});

const scenarios = {
  async refresh() {
    const page = await open();
    await ask(page, "pace=80");
    await words(page, 5);
    const before = await text(page);
    await page.reload();
    await words(page, 1); // its first paint
    const after = await text(page);
    await words(page, 12);
    await page.reload();
    await status(page, "completed");
    return {before, after, text: await text(page), did: await did(page), count: await page.textContent("#count")};
  },

  async tabs() {
    const page = await open();
    await ask(page, "pace=60");
    await words(page, 3);
    const second = await open({}, page.context());
    await words(second, 5);
    await Promise.all([status(page, "completed"), status(second, "completed")]);
    const texts = [await text(page), await text(second)];
    await ask(page, "pace=60 again");
    await second.waitForFunction(() => document.querySelectorAll("#recent li").length === 2);
    await second.click("#recent li button");
    await words(second, 4);
    await second.click("#stop");
    await Promise.all([status(page, "cancelled"), status(second, "cancelled")]);
    return {texts, did: await did(page)};
  },

  async stop() {
    const page = await open();
    await ask(page, "pace=100");
    await words(page, 3);
    await page.click("#stop");
    await status(page, "cancelled");
    const kept = await text(page);
    await page.reload();
    await status(page, "cancelled");
    return {kept, after: await text(page), label: await page.textContent("#status-text")};
  },

  async twice() {
    const page = await open();
    await page.fill("#prompt", "pace=5 once");
    await page.dblclick("#send");
    await page.click("#send");
    await status(page, "completed");
    return {recent: await page.locator("#recent li").count(), did: await did(page)};
  },

  async unanswered() {
    // The first answer is lost on its way; the second try finds the first one's job.
    const page = await open();
    let lost = 0;
    await page.route("**/jobs", async (route) => {
      if (lost++) return route.continue();
      await route.fetch();
      return route.abort();
    });
    await ask(page, "pace=5 lost");
    await page.waitForSelector("#alert:not([hidden])");
    const left = await page.inputValue("#prompt");
    await page.keyboard.press("Enter");
    await status(page, "completed");
    return {left, recent: await page.locator("#recent li").count(), keys: lost};
  },

  async restart() {
    const page = await open();
    await watchClears(page);
    await ask(page, "pace=30 die");
    await words(page, 10);
    await page.waitForFunction(() => document.getElementById("attempt").textContent === "2");
    const notice = await page.textContent("#notice");
    await status(page, "completed");
    return {notice, clears: await page.evaluate(() => window.clears), text: await text(page), did: await did(page)};
  },

  async offline() {
    const page = await open();
    await watchClears(page);
    await ask(page, "pace=150");
    await words(page, 4);
    await page.context().setOffline(true); // no new connections
    await fetch(new URL("/_cut", options.url)); // and those that there are break
    await page.waitForSelector("#link:not([hidden])");
    const during = await text(page);
    await new Promise((resolve) => setTimeout(resolve, options.seconds * 1000));
    const still = await text(page);
    await page.context().setOffline(false);
    await status(page, "completed");
    return {during, still, text: await text(page), clears: await page.evaluate(() => window.clears), did: await did(page)};
  },

  async ends() {
    const page = await open();
    await ask(page, "pace=5 fail");
    await status(page, "failed");
    const failed = {notice: await page.textContent("#notice"), text: await text(page)};
    await ask(page, "pace=5 wait=400");
    await page.waitForFunction(() => document.getElementById("status-text").textContent.startsWith("Wait"));
    await status(page, "completed");
    await page.click("#recent li:nth-child(2) button");
    await status(page, "failed");
    await page.click("#clear");
    return {failed, left: await page.evaluate(() => Object.keys(localStorage).filter((key) => key !== "outlast:dares"))};
  },

  async keyboard() {
    const page = await open();
    const focused = () => page.evaluate(() => document.activeElement.id || document.activeElement.tagName);
    const order = [await focused()];
    await page.keyboard.type("pace=100 line");
    await page.keyboard.press("Shift+Enter");
    await page.keyboard.type("two");
    await page.keyboard.press("Enter");
    await words(page, 2);
    for (let i = 0; i < 3; i++) {
      await page.keyboard.press("Tab");
      order.push(await focused());
    }
    await page.keyboard.press("Shift+Tab");
    await page.keyboard.press("Enter");
    await status(page, "cancelled");
    return {order, prompt: await page.textContent("#job-prompt")};
  },

  async phone() {
    const settings = {viewport: {width: 360, height: 700}, isMobile: true, hasTouch: true, deviceScaleFactor: 2};
    const page = await open({...settings, colorScheme: options.scheme});
    await page.tap("#prompt");
    await page.keyboard.type(`pace=60 ${"long".repeat(60)} with some words behind it`);
    await page.tap("#send");
    await words(page, 4);
    const small = await page.$$eval("button", (all) => all.filter((button) => button.offsetParent)
      .map((button) => [button.id || "recent", button.getBoundingClientRect().height]).filter(([, height]) => height < 28));
    const wide = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth);
    const contrast = await page.evaluate(measure);
    await page.screenshot({path: `${options.pictures}/phone-${options.scheme}.png`, fullPage: true});
    await page.tap("#stop");
    await status(page, "cancelled");
    return {small, wide, contrast};
  },

  // The dashboard: each view is drawn, measured and photographed.
  async dashboard() {
    const phone = options.phone && {viewport: {width: 360, height: 740}, isMobile: true, hasTouch: true, deviceScaleFactor: 2};
    const page = await open({...phone, colorScheme: options.scheme});
    const views = {};
    for (const [name, hash] of Object.entries(options.views)) {
      await page.evaluate((to) => { location.hash = to; }, hash);
      await page.waitForFunction((title) => document.getElementById("main").dataset.at === location.hash
        && document.querySelector("h1")?.textContent === title, options.titles[name]);
      if (options.wait) await page.waitForTimeout(options.wait);
      views[name] = await page.evaluate(() => ({
        text: document.getElementById("main").innerText,
        wide: document.documentElement.scrollWidth - innerWidth,
        injected: document.querySelectorAll("main img, main script, main b:not(figcaption b)").length,
      }));
      views[name].contrast = await page.evaluate(measure);
      views[name].small = await page.$$eval("button, .tabs a", (all) => all.filter((one) => one.checkVisibility() && !one.closest(".unseen"))
        .map((one) => [one.textContent, one.getBoundingClientRect().height]).filter(([, height]) => height < 28));
      await page.screenshot({path: `${options.pictures}/${name}-${options.scheme}${options.phone ? "-phone" : ""}.png`, fullPage: true});
    }
    return {views};
  },

  // What an operator does, with the keyboard alone.
  async operate() {
    const page = await open();
    const title = (text) => page.waitForFunction((wanted) => document.querySelector("h1")?.textContent === wanted, text);
    const to = async (name, view) => { // Tab until the named element has the focus
      for (let n = 0; n < 80; n++) {
        if (await page.evaluate(([text, inside]) => {
          const now = document.activeElement;
          return now.textContent.trim().startsWith(text) && now.closest(inside) !== null && now.matches("a, button");
        }, [name, view ?? "body"])) return;
        await page.keyboard.press("Tab");
      }
      throw new Error(`no way to ${name}`);
    };
    const press = async (name, view) => {
      await to(name, view);
      await page.keyboard.press("Enter");
    };
    const find = async (id) => {
      await page.locator("#id").focus();
      await page.keyboard.type(id);
      await page.keyboard.press("Enter");
      await title(id);
    };
    const seen = {};
    await title("Queues");
    await press("chat", "main");
    await title("chat");
    await press("Pause", "main");
    await page.waitForFunction(() => document.querySelector(".pill.paused"));
    seen.paused = await page.textContent(".pill.paused");
    await press("Resume", "main");
    await page.waitForFunction(() => !document.querySelector(".pill.paused"));
    seen.resumed = true;
    await find("no-such-job");
    seen.unknown = await page.textContent(".empty");
    await find(options.id);
    await press("Cancel", "main");
    await page.waitForSelector("dialog[open]");
    await page.keyboard.press("Escape");
    await page.waitForSelector("dialog", {state: "hidden"});
    seen.kept = await page.textContent(".head .pill");
    await press("Cancel", "main");
    await page.waitForSelector("dialog[open]");
    await press("Cancel the job", "dialog");
    await page.waitForFunction(() => document.querySelector(".head .pill").textContent === "Cancelled");
    seen.status = await page.textContent(".head .pill");
    await find(options.live);
    await page.waitForSelector("#output pre");
    seen.output = await page.textContent("#output pre");
    await press("chat", "main");
    await title("chat");
    await press("Dead", ".tabs");
    await press("Retry all", "main");
    await page.waitForSelector("dialog[open]");
    await press("Retry all", "dialog");
    await page.waitForSelector(".empty");
    seen.dead = await page.textContent(".empty");
    return seen;
  },

  // Every client across connections that are cut after every n-th event, in the browser and in Node.
  async cuts() {
    const page = await open();
    return {results: await page.evaluate(cutAll, {kinds: ["EventSource", "watchJob", "pages"], most: options.most})};
  },

  async nodeCuts() {
    globalThis.EventSource = NodeEventSource;
    return {results: await cutAll({kinds: ["EventSource"], most: options.most, base: options.url})};
  },

  async helper() {
    const page = await open();
    return page.evaluate(async () => {
      const {watchJob} = await import("/demo/watch.js");
      const make = async (prompt) => (await fetch("/v1/jobs", {
        method: "POST", headers: {"content-type": "application/json"}, body: JSON.stringify({payload: {prompt}}),
      })).json();
      const seen = {};
      const job = await make("pace=5");
      const first = watchJob(job.events_url);
      seen.end = (await first.done).type;
      seen.again = await watchJob(job.events_url, {after: first.cursor}).done;
      seen.unknown = await watchJob("/v1/jobs/unknown/events").done.catch((error) => error.status);
      seen.bad = await watchJob(job.events_url, {after: "x"}).done.catch((error) => error.status);
      const slow = await make("pace=50");
      const states = [];
      const got = [];
      const closing = watchJob(slow.events_url, {
        onEvent: (event) => {
          got.push(event.type);
          if (event.type === "chunk") closing.close();
        },
        onConnection: (state) => states.push(state),
      });
      seen.closed = await closing.done;
      const quiet = got.length;
      const stop = new AbortController();
      let asked = 0;
      const tokens = watchJob(async () => `${slow.events_url}?n=${asked++}`, {
        after: closing.cursor, signal: stop.signal, onEvent: ({type}) => type === "chunk" && stop.abort(),
      });
      seen.aborted = await tokens.done;
      seen.asked = asked;
      seen.states = states;
      seen.after = got.length - quiet;
      seen.types = [...new Set(got)];
      // A server that is away for some tries.
      let tries = 0;
      const flaky = (...all) => ++tries < 3
        ? Promise.resolve(new Response("", {status: 503, headers: {"retry-after": "0.01"}})) : fetch(...all);
      seen.recovered = (await watchJob(job.events_url, {fetch: flaky}).done).type;
      seen.tries = tries;
      // A connection without a byte counts as dead.
      let connections = 0;
      const dead = (where, init) => ++connections > 1 ? fetch(where, init) : Promise.resolve(new Response(
        new ReadableStream({start(controller) { init.signal.onabort = () => controller.error(new Error("aborted")); }}),
        {headers: {"content-type": "text/event-stream"}}));
      seen.revived = (await watchJob(job.events_url, {fetch: dead, quiet: 100}).done).type;
      return seen;
    });
  },
};

// In the page: how well the texts stand out against what is behind them, the worst of them.
function measure() {
  const probe = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const rgb = (color, under) => {
    probe.fillStyle = under;
    probe.fillRect(0, 0, 1, 1);
    probe.fillStyle = color;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const light = (parts) => {
    const [r, g, b] = parts.map((part) => part / 255).map((p) => p <= 0.04045 ? p / 12.92 : ((p + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const behind = (element) => {
    const chain = [];
    for (let each = element; each; each = each.parentElement) chain.unshift(getComputedStyle(each).backgroundColor);
    return chain.reduce((under, color) => `rgb(${rgb(color, under)})`, "white");
  };
  let worst = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    if (!walker.currentNode.data.trim() || !element.checkVisibility() || element.closest(".unseen, noscript")) continue;
    const under = behind(element);
    const [a, b] = [light(rgb(getComputedStyle(element).color, under)), light(rgb(under, "white"))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst[0]) worst = [ratio, walker.currentNode.data.trim()];
  }
  return worst;
}

// In the page or in Node: follow one job for each n, with connections cut after n events.
async function cutAll({kinds, most, base = location.href}) {
  const at = (path) => new URL(path, base).href;
  const {watchJob} = globalThis.document ? await import("/demo/watch.js") : {};
  const results = [];
  await Promise.all(kinds.map(async (kind) => {
    for (let n = 1; n <= most; n++) results.push(await one(kind, n));
  }));
  return results;

  async function one(kind, n) {
    const job = await (await fetch(at("/v1/jobs"), {
      method: "POST", headers: {"content-type": "application/json"},
      body: JSON.stringify({payload: {prompt: `pace=3 retry ${kind} ${n}`}}),
    })).json();
    const url = at(`${job.events_url}?cut=${n}`);
    const view = {kind, n, text: "", restarts: 0, ids: [], result: null};
    const take = (type, data, id) => {
      if (id && type !== "state") view.ids.push(id);
      if (type === "chunk") view.text += data.text;
      if (type === "restarted" || type === "gap") [view.text, view.restarts] = ["", view.restarts + 1];
      if (type === "completed") view.result = data.result;
    };
    if (kind === "EventSource") {
      await new Promise((resolve) => {
        const source = new EventSource(url);
        for (const type of ["state", "chunk", "restarted", "gap", "completed"]) {
          source.addEventListener(type, (event) => take(type, JSON.parse(event.data), event.lastEventId));
        }
        source.onerror = () => source.readyState === 2 && resolve(); // only the server's 204 ends it
      });
    } else {
      await watchJob(kind === "pages" ? at(`${job.events_url}?limit=${n}`) : url, {
        poll: kind === "pages", onEvent: ({type, data, id}) => take(type, data, id),
      }).done;
    }
    return {...view, ids: undefined, repeated: view.ids.length - new Set(view.ids).size};
  }
}

const seen = await scenarios[options.scenario]();
console.log(JSON.stringify({complaints, ...seen}));
process.exit();
