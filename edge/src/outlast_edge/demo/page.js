// What the page remembers of a job lies in localStorage: its URLs, the text so far and the cursor that belongs to it.
// So a refresh shows at once what was there and goes on behind it, and nothing is asked for twice.

import {watchJob} from "./watch.js";

const $ = (id) => document.getElementById(id);
const ENDED = new Set(["completed", "failed", "cancelled", "gone"]);
const LABEL = {
  waiting: "Waiting for a worker", scheduled: "Waiting to try again", active: "Answering", completed: "Done",
  failed: "Failed", cancelled: "Stopped", gone: "Expired",
};
const KEEP = 30;
const me = Math.random().toString(36).slice(2);
let reloaded = performance.getEntriesByType("navigation")[0]?.type === "reload";

// -- what is remembered -------------------------------------------------------------------------------------------

const store = {
  get(name, otherwise) {
    try {
      return JSON.parse(localStorage.getItem(`outlast:${name}`)) ?? otherwise;
    } catch {
      return otherwise;
    }
  },
  set(name, value) {
    try {
      localStorage.setItem(`outlast:${name}`, JSON.stringify(value));
    } catch {
      // full or forbidden: the page still works, a refresh starts from the beginning
    }
  },
  drop(name) {
    localStorage.removeItem(`outlast:${name}`);
  },
};
const ids = () => store.get("jobs", []);
const job = (id) => store.get(`job:${id}`, null);

function keep(record) {
  store.set(`job:${record.id}`, record);
  const all = [record.id, ...ids().filter((id) => id !== record.id)];
  all.slice(KEEP).forEach((id) => store.drop(`job:${id}`));
  store.set("jobs", all.slice(0, KEEP));
}

// -- asking -------------------------------------------------------------------------------------------------------

let jobsUrl = "v1/jobs";
let sending = false;

async function ask(prompt) {
  // One key for one submission, kept until there is an answer: a second try can only find the first one's job.
  const pending = store.get("pending", null);
  const key = pending?.prompt === prompt ? pending.key : crypto.randomUUID?.() ?? me + Date.now().toString(36);
  store.set("pending", {key, prompt});
  sending = true;
  $("alert").hidden = true;
  $("send").setAttribute("aria-busy", "true");
  try {
    const reply = await fetch(jobsUrl, {
      method: "POST",
      headers: {"content-type": "application/json", "idempotency-key": key},
      body: JSON.stringify({payload: {prompt}}),
    });
    const body = await reply.json();
    if (reply.status >= 500) throw new Error(body.detail);
    store.drop("pending");
    if (!reply.ok) throw new Error(body.detail);
    if (!job(body.id)) {
      keep({...body, prompt, at: Date.now(), text: "", cursor: null, attempt: 0, progress: 0, count: 0});
    }
    show(body.id);
  } catch (error) {
    $("alert").textContent = `Not sent. ${error instanceof TypeError ? "The server cannot be reached." : error.message}`;
    $("alert").hidden = false;
    if (!$("prompt").value) $("prompt").value = prompt;
  } finally {
    sending = false;
    $("send").removeAttribute("aria-busy");
  }
}

let asked = 0;
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const prompt = $("prompt").value.trim();
  if (!prompt || sending) {
    // The box is empty since the first click took the prompt: there is nothing to ask for a second time.
    if (Date.now() - asked < 1500) dared("twice");
    else $("prompt").focus();
    return;
  }
  asked = Date.now();
  $("prompt").value = "";
  ask(prompt);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    $("ask").requestSubmit();
  }
});

// -- watching -----------------------------------------------------------------------------------------------------

let shown = null; // the record on display
let watch = null;
let saving = 0;

function save() {
  clearTimeout(saving);
  saving = 0;
  if (shown && job(shown.id)) store.set(`job:${shown.id}`, shown);
}
const saveSoon = () => (saving ||= setTimeout(save, 200));

function show(id) {
  save();
  watch?.close();
  watch = null;
  shown = job(id);
  if (!shown) return;
  store.set("shown", id);
  $("link").hidden = $("notice").hidden = true;
  stoppable(true);
  paint();
  list();
  if (ENDED.has(shown.status)) return;
  if (shown.text && reloaded) {
    reloaded = false;
    dared("refresh");
    say("Picked up where it was: nothing is lost, nothing is asked for twice.");
  }
  const mine = shown;
  watch = watchJob(mine.events_url, {
    after: mine.cursor,
    onEvent: (event) => mine === shown && take(event),
    onConnection: (state) => {
      if (mine !== shown || ENDED.has(mine.status)) return;
      if (state === "open" && !$("link").hidden) dared("offline");
      $("link").hidden = state !== "lost";
    },
  });
  watch.done.catch(() => null).then((end) => end ?? (mine === shown && missing()));
  channel?.postMessage({from: me, watching: id});
}

async function missing() {
  // Nothing more comes, and the end was not among what came: the record tells, if it is still there.
  const mine = shown;
  let now = {status: "gone"};
  try {
    const reply = await fetch(mine.url);
    if (reply.ok) now = await reply.json();
  } catch {
    return;
  }
  if (mine !== shown) return;
  if (now.status === "gone") {
    mine.status = "gone";
    say("The record has expired. This is what was received of it.");
    paint();
    save();
    list();
  } else if (ENDED.has(now.status)) {
    take({type: now.status, data: now, id: null});
  }
}

function take({type, data, id}) {
  const record = shown;
  const before = record.status;
  if (id) record.cursor = id;
  record.count += type === "state" ? 0 : 1;
  switch (type) {
    case "state":
      Object.assign(record, data);
      break;
    case "chunk":
      record.text += data.text;
      record.status = "active";
      break;
    case "progress":
      record.progress = data.value;
      break;
    case "restarted":
      if (record.text) dared("kill");
      record.text = "";
      record.attempt = data.attempt;
      say(`The worker was lost. Attempt ${data.attempt} starts over.`);
      break;
    case "gap":
      record.text = "";
      say("Some output is no longer kept. It goes on from here.");
      break;
    case "completed":
      record.text = typeof data.result === "string" ? data.result : record.text || JSON.stringify(data.result, null, 2);
      record.progress = 1;
      break;
    case "failed":
      record.error = data.error;
      break;
    case "cancelled":
      dared("stop");
      break;
  }
  if (ENDED.has(type)) {
    record.status = type;
    record.ended = Date.now();
    save();
  } else {
    saveSoon();
  }
  if (record.status !== before) {
    save();
    list();
  }
  paintSoon();
}

$("stop").addEventListener("click", async () => {
  const {id, cancel_url} = shown;
  stoppable(false);
  try {
    const reply = await fetch(cancel_url, {method: "POST"});
    if (!reply.ok && reply.status !== 404) throw new Error();
  } catch {
    if (shown.id === id) {
      say("Stop did not reach the server. Try again.", true);
      stoppable(true);
    }
  }
});

function stoppable(yes) {
  $("stop").disabled = !yes;
  $("stop").textContent = yes ? "Stop" : "Stopping…";
}

// -- showing ------------------------------------------------------------------------------------------------------

let painting = 0;
const paintSoon = () => (painting ||= requestAnimationFrame(paint));

function say(text, bad = false) {
  $("notice").textContent = text;
  $("notice").classList.toggle("failed-notice", bad);
  $("notice").hidden = false;
}

function paint() {
  painting = 0;
  const {status, text, attempt, progress, count, cursor, prompt, error} = shown;
  const over = ENDED.has(status);
  const answer = $("answer");
  $("job").hidden = false;
  $("job").dataset.status = status;
  if ($("status-text").textContent !== LABEL[status]) $("status-text").textContent = LABEL[status];
  if ($("job-prompt").textContent !== prompt) $("job-prompt").textContent = prompt;
  if (status === "failed") say(error ?? "The job failed.", true);
  if (status === "cancelled") say(text ? "It was stopped, and the model with it." : "It was stopped before it began.");
  write(answer, text || (over && status !== "completed" ? "No answer." : ""));
  answer.classList.toggle("live", status === "active");
  answer.classList.toggle("dim", over && status !== "completed");
  answer.setAttribute("aria-busy", String(!over));
  if (over && status !== "gone") $("link").hidden = true;
  $("stop").hidden = over;
  const vague = status === "active" && !progress;
  $("bar").classList.toggle("vague", vague);
  $("bar").firstElementChild.style.transform = vague ? "" : `scaleX(${over ? 1 : progress})`;
  if (vague) $("bar").removeAttribute("aria-valuenow");
  else $("bar").setAttribute("aria-valuenow", Math.round((over ? 1 : progress) * 100));
  $("attempt").textContent = attempt || "–";
  $("count").textContent = count;
  $("cursor").textContent = cursor ?? "–";
  tick();
}

function write(element, text) {
  // Only what is new is added: the reader's selection and place survive.
  const node = element.firstChild;
  if (node && text.startsWith(node.data)) {
    if (text.length > node.length) node.appendData(text.slice(node.length));
  } else {
    element.textContent = text;
  }
}

function tick() {
  $("time").textContent = `${(Math.max(0, (shown.ended ?? Date.now()) - shown.at) / 1000).toFixed(1)} s`;
}
setInterval(() => shown && !ENDED.has(shown.status) && tick(), 100);

function ago(time) {
  const minutes = Math.floor((Date.now() - time) / 60000);
  return minutes < 1 ? "now" : minutes < 60 ? `${minutes} min` : minutes < 1440 ? `${Math.floor(minutes / 60)} h` : `${Math.floor(minutes / 1440)} d`;
}

function list() {
  const all = ids().map(job).filter(Boolean);
  $("recent").replaceChildren(...all.map((record) => {
    const button = document.createElement("button");
    button.type = "button";
    button.dataset.status = record.status;
    if (record.id === shown?.id) button.setAttribute("aria-current", "true");
    const dot = document.createElement("i");
    dot.className = "dot";
    const name = document.createElement("b");
    name.textContent = record.prompt;
    button.setAttribute("aria-label", `${record.prompt}, ${LABEL[record.status]}`);
    const when = document.createElement("time");
    when.textContent = ago(record.at);
    button.append(dot, name, when);
    button.addEventListener("click", () => show(record.id));
    const item = document.createElement("li");
    item.append(button);
    return item;
  }));
  $("empty").hidden = all.length > 0;
  $("clear").hidden = all.length === 0;
}

$("clear").addEventListener("click", () => {
  watch?.close();
  watch = shown = null;
  ids().forEach((id) => store.drop(`job:${id}`));
  ["jobs", "shown", "dares"].forEach(store.drop);
  $("job").hidden = true;
  list();
  dares();
  $("prompt").focus();
});

// Jobs that run but are not on display: one look each while the tab is seen, no stream (a browser has six for a host).
async function look() {
  if (document.hidden) return;
  for (const record of ids().map(job).filter((each) => each && each.id !== shown?.id && !ENDED.has(each.status))) {
    try {
      const reply = await fetch(record.url);
      const now = reply.ok ? await reply.json() : null;
      if (reply.status === 404) store.set(`job:${record.id}`, {...record, status: "gone"});
      // An end is taken in when the job is opened, with the text that belongs to it.
      else if (now && !ENDED.has(now.status)) store.set(`job:${record.id}`, {...record, status: now.status});
    } catch {
      return;
    }
  }
  list();
}
setInterval(look, 10000);

// -- other tabs, and what was dared ----------------------------------------------------------------------------------

const channel = "BroadcastChannel" in globalThis ? new BroadcastChannel("outlast") : null;
channel?.addEventListener("message", ({data}) => {
  if (data.from === me || data.watching !== shown?.id || ENDED.has(shown.status)) return;
  if (!data.reply) channel.postMessage({from: me, watching: shown.id, reply: true});
  dared("tabs");
});
addEventListener("storage", ({key}) => key === "outlast:jobs" && list());
addEventListener("pagehide", save);

function dared(name) {
  const done = store.get("dares", []);
  if (done.includes(name)) return;
  store.set("dares", [...done, name]);
  dares();
}

function dares() {
  const done = store.get("dares", []);
  for (const item of $("dares").children) item.classList.toggle("did", done.includes(item.dataset.dare));
}

// -- start --------------------------------------------------------------------------------------------------------

async function start() {
  dares();
  list();
  try {
    const {model, note, jobs_url} = await (await fetch("demo/info")).json();
    jobsUrl = jobs_url;
    $("model-name").textContent = model ?? "";
    $("model").hidden = !model;
    $("note").textContent = model && note ? `Answered by ${model}: ${note}` : note ?? "";
    $("note").hidden = !note;
  } catch {
    // the page works without
  }
  const last = store.get("shown", null) ?? ids()[0];
  if (last) show(last);
  const pending = store.get("pending", null);
  if (pending) ask(pending.prompt); // the page went away before the answer came: the same key finds the same job
  look();
}
start();
