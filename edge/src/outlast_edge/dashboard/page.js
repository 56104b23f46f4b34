// One view at a time, named by what stands behind # in the address. A view is drawn anew from each answer and laid over
// what is there, so that focus, selection and scroll stay where they are. All text goes in as text, never as HTML.

import {watchJob} from "./watch.js";

const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const STATES = {waiting: "Waiting", active: "Running", scheduled: "Scheduled", dead: "Dead"};
const LABEL = {
  waiting: "Waiting", scheduled: "Scheduled", active: "Running", completed: "Completed", failed: "Failed", cancelled: "Cancelled",
};
const ENDED = new Set(["completed", "failed", "cancelled"]);

// -- elements -----------------------------------------------------------------------------------------------------

function h(name, properties, ...children) {
  const svg = name.startsWith("svg:");
  const element = svg ? document.createElementNS(SVG, name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(properties ?? {})) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

function lay(there, wanted) {
  if (there.hasAttribute("data-keep") && there.id === wanted.id) return;
  for (const {name} of [...there.attributes]) if (!wanted.hasAttribute(name)) there.removeAttribute(name);
  for (const {name, value} of wanted.attributes) if (there.getAttribute(name) !== value) there.setAttribute(name, value);
  const [old, fresh] = [[...there.childNodes], [...wanted.childNodes]];
  fresh.forEach((child, n) => {
    const now = old[n];
    const same = now && now.nodeName === child.nodeName && (now.dataset?.key === child.dataset?.key);
    if (!now) there.append(child);
    else if (!same) now.replaceWith(child);
    else if (child.nodeType === Node.TEXT_NODE) { if (now.data !== child.data) now.data = child.data; }
    else lay(now, child);
  });
  old.slice(fresh.length).forEach((child) => child.remove());
}

// -- words --------------------------------------------------------------------------------------------------------

function span(ms) {
  if (ms === null || ms === undefined) return "–";
  const s = Math.max(0, ms) / 1000;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 60) return `${Math.floor(s)} s`;
  for (const [unit, name, less, lesser] of [[86400, "d", 3600, "h"], [3600, "h", 60, "m"], [60, "m", 1, "s"]]) {
    if (s >= unit) return `${Math.floor(s / unit)}${name} ${String(Math.floor(s % unit / less)).padStart(2, "0")}${lesser}`;
  }
}
const count = (n) => n < 10000 ? String(n) : new Intl.NumberFormat("en", {notation: "compact", maximumFractionDigits: 1}).format(n);
const plain = (n) => new Intl.NumberFormat("en", {maximumFractionDigits: 6}).format(n);
const clock = (ms) => new Date(ms).toLocaleString(undefined, {dateStyle: "medium", timeStyle: "medium"});
const rate = (n) => n === undefined ? "–" : `${n < 10 ? n : Math.round(n)}/min`;
const when = (ms, now, after = " ago") => ms === null ? "" : h("time", {datetime: new Date(ms).toISOString(), title: clock(ms)},
  ms > now ? `in ${span(ms - now)}` : `${span(now - ms)}${after}`);
const pill = (kind, text = LABEL[kind] ?? kind) => h("span", {class: `pill ${kind}`}, text);
const at = {
  home: () => "#/",
  queue: (name, state, more = "") => `#/queue/${encodeURIComponent(name)}/${state ?? "waiting"}${more}`,
  job: (queue, id) => `#/job/${encodeURIComponent(queue)}/${encodeURIComponent(id)}`,
};
const tile = (name, value, alarm = false) => h("div", {class: alarm && "alarm"}, h("dt", null, name), h("dd", {title: String(value)}, value));
const act = (name, data, text, kind) => h("button", {type: "button", class: kind, "data-act": name,
  ...Object.fromEntries(Object.entries(data).map(([key, value]) => [`data-${key}`, value]))}, text);

// -- plots --------------------------------------------------------------------------------------------------------

const [W, H] = [300, 100];

function lines(samples, {spark = false} = {}) {
  // samples: [at, waiting, active, scheduled, dead, seq]
  if (samples.length < 2) return h("div", {class: `nothing ${spark && "spark"}`}, spark ? "" : "The plot grows while this page is open.");
  const [first, last] = [samples[0][0], samples.at(-1)[0]];
  const top = Math.max(1, ...samples.map(([, waiting, active]) => Math.max(waiting, spark ? 0 : active)));
  const x = (t) => ((t - first) / (last - first) * W).toFixed(1);
  const y = (n) => (H - n / top * (H - 4)).toFixed(1);
  const path = (n) => samples.map((one, k) => `${k ? "L" : "M"}${x(one[0])} ${y(one[n])}`).join("");
  const said = `Waiting ${samples[0][1]} to ${samples.at(-1)[1]}, highest ${Math.max(...samples.map((one) => one[1]))}, in the last ${span(last - first)}`;
  return h("svg:svg", {class: `plot ${spark ? "spark" : ""}`, viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": said},
    h("svg:path", {class: "a", d: `${path(1)}L${W} ${H}L0 ${H}Z`}), h("svg:path", {class: "l", d: path(1)}),
    !spark && h("svg:path", {class: "l hot", d: path(2)}));
}

function outcomes(samples) {
  // What ended between two looks: what came, less what still waits or runs. Gathered into at most 40 bars, each as wide as
  // its time, so that a long time without a look makes a wide bar and no high one.
  const step = Math.ceil((samples.length - 1) / 40) || 1;
  const [first, last] = [samples[0]?.[0], samples.at(-1)?.[0]];
  const bars = [];
  for (let n = 0; n < samples.length - 1; n += step) {
    const [old, now] = [samples[n], samples[Math.min(n + step, samples.length - 1)]];
    const ended = Math.max(0, now[5] - old[5] - (now[1] - old[1]) - (now[2] - old[2]));
    const died = Math.max(0, now[4] - old[4]);
    bars.push({at: old[0], to: now[0], fine: Math.max(0, ended - died), died});
  }
  const pace = ({at: from, to, fine, died}) => (fine + died) / (to - from);
  const top = Math.max(0, ...bars.map(pace));
  const sum = bars.reduce(([fine, died], bar) => [fine + bar.fine, died + bar.died], [0, 0]);
  const plot = top === 0 ? h("div", {class: "nothing"}, "Nothing has ended since this page first looked.")
    : h("svg:svg", {class: "plot", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": `${sum[0]} attempts ended, ${sum[1]} jobs died`},
      bars.map((bar) => {
        const [x, width] = [(bar.at - first) / (last - first) * W, Math.max(0.5, (bar.to - bar.at) / (last - first) * W - 0.8)];
        const high = pace(bar) / top * (H - 4);
        const red = high * bar.died / (bar.fine + bar.died || 1);
        return [h("svg:rect", {class: "b green", x, width, y: H - high + red, height: high - red}),
          h("svg:rect", {class: "b red", x, width, y: H - high, height: red})];
      }));
  return [plot, sum];
}

function days(found, name, axis) {
  const top = Math.max(...axis.map((day) => found[day]?.[name] ?? 0)) || 1;
  const wide = W / axis.length;
  return h("svg:svg", {class: "plot", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img",
    "aria-label": `${name}: ${axis.filter((day) => found[day]?.[name]).map((day) => `${day} ${plain(found[day][name])}`).join(", ")}`},
  axis.map((day, n) => {
    const used = found[day]?.[name] ?? 0;
    const high = used / top * (H - 4);
    return h("svg:rect", {class: "b", x: n * wide + 1.5, width: wide - 3, y: H - high, height: high}, h("svg:title", null, `${day}: ${plain(used)}`));
  }));
}

// -- the overview -------------------------------------------------------------------------------------------------

function queues({queues: found, next, total}, {after}) {
  return [
    h("div", {class: "head"}, h("h1", null, "Queues"), h("span", {class: "soft small"}, total > found.length && `${found.length} of ${total}`)),
    h("div", {class: "queues"}, found.map((queue) => h("section", {class: "queue", "data-key": queue.queue},
      h("div", null, h("h2", null, h("a", {href: at.queue(queue.queue)}, queue.queue)), standing(queue)),
      h("dl", null,
        tile("waiting", count(queue.waiting)), tile("running", count(queue.active)), tile("scheduled", count(queue.scheduled)),
        tile("dead", count(queue.dead), queue.dead > 0), tile("next waits", span(queue.next_waits))),
      h("figure", null, lines(queue.samples, {spark: true}),
        h("figcaption", null, queue.rates ? `${rate(queue.rates.arrived)} in, ${rate(queue.rates.ended)} ended` : "measuring…"))))),
    (next || after) && h("div", {class: "bar"}, h("p", null, ""), h("div", {class: "row"},
      after && h("a", {href: "#/"}, "First queues"), next && h("a", {href: `#/?after=${encodeURIComponent(next)}`}, "More queues"))),
  ];
}

function standing({paused, paused_until, workers, slots, waiting, active}) {
  const busy = `${workers} ${workers === 1 ? "worker" : "workers"}`;
  if (paused) return pill("paused", paused_until ? `Paused until ${new Date(paused_until).toLocaleTimeString()}` : "Paused");
  if (!workers && waiting) return pill("alarm", "Jobs wait and no worker is alive");
  if (!workers) return pill("idle", "No worker is alive");
  return pill(active ? "active" : "idle", `${busy}, ${Math.min(active, slots)} of ${slots} slots busy`);
}

// -- one queue ----------------------------------------------------------------------------------------------------

function queue(data, {state, page}) {
  const {queue: name, workers, running, samples, rates} = data;
  const slots = workers.reduce((sum, worker) => sum + worker.concurrency, 0);
  const [ended, [fine, died]] = outcomes(samples);
  return [
    h("p", {class: "crumbs"}, h("a", {href: "#/"}, "Queues")),
    h("div", {class: "head"}, h("h1", null, name), standing({...data, workers: workers.length, slots}), h("div", {class: "row"},
      data.paused ? act("resume", {queue: name}, "Resume") : act("pause", {queue: name}, "Pause"))),
    h("dl", {class: "tiles"}, tile("waiting", count(data.waiting)), tile("running", count(data.active)),
      tile("scheduled", count(data.scheduled)), tile("dead", count(data.dead), data.dead > 0),
      tile("oldest waits", span(data.oldest_waits)), tile("workers", workers.length, data.waiting > 0 && !workers.length && !data.paused)),
    data.rules && h("p", {class: "small soft below", "data-key": "rules"}, `Rules: ${data.rules}`),
    h("div", {class: "grid"},
      h("figure", {class: "card"}, h("figcaption", null, h("b", null, "Depth"), h("span", null, rates ? `${rate(rates.arrived)} arrive, ${rate(rates.started)} start` : "measuring…")),
        lines(samples), h("figcaption", null, h("span", {class: "key"}, "waiting"), h("span", {class: "key hot"}, "running"),
          h("span", null, samples.length > 1 ? `last ${span(samples.at(-1)[0] - samples[0][0])}` : ""))),
      h("figure", {class: "card"}, h("figcaption", null, h("b", null, "Outcomes"), h("span", null, rates ? `${rate(rates.ended)} end, ${rate(rates.died)} die` : "measuring…")),
        ended, h("figcaption", null, h("span", {class: "key green"}, `attempts ended (${count(fine)})`), h("span", {class: "key red"}, `died (${count(died)})`)))),
    h("section", {class: "card"}, h("h2", null, "Workers"), crew(name, workers, running, data.active)),
    tabs(name, state, data),
    state === "usage" ? usage(data) : listing(data, state, page),
  ];
}

function crew(name, workers, running, active) {
  if (!workers.length && !running.length) return h("p", {class: "soft"}, "No worker has given a sign of life in the last 150 seconds.");
  const known = new Set(workers.map((worker) => worker.id));
  const others = running.filter((job) => !known.has(job.worker));
  const links = (jobs) => jobs.map((job, n) => [n > 0 && ", ", h("a", {class: "mono", href: at.job(name, job.id)}, job.id)]);
  return [
    h("table", null, h("thead", null, h("tr", null, ["Worker", "State", "Busy", "Seen", "Runs of this queue"].map((text) => h("th", {scope: "col"}, text)))),
      h("tbody", null,
        workers.map((worker) => h("tr", {"data-key": worker.id},
          h("td", {title: worker.id}, worker.name || `${worker.host}:${worker.pid}`, worker.name && h("span", {class: "soft small"}, ` ${worker.host}:${worker.pid}`)),
          h("td", null, pill(worker.state, worker.state)),
          h("td", {"data-label": "Busy", class: "num"}, `${worker.active} of ${worker.concurrency}`),
          h("td", {"data-label": "Seen", class: "num"}, `${span(worker.seen)} ago`),
          h("td", {"data-label": "Runs"}, links(running.filter((job) => job.worker === worker.id))))),
        others.length > 0 && h("tr", null, h("td", {class: "soft"}, "not seen lately"), h("td"), h("td"), h("td"), h("td", {"data-label": "Runs"}, links(others))))),
    active > running.length && h("p", {class: "small soft"}, `The first ${running.length} of ${count(active)} running jobs are shown.`),
  ];
}

const tabs = (name, now, data) => h("nav", {class: "tabs", "aria-label": "Jobs by state"},
  Object.entries(STATES).map(([state, label]) => h("a", {href: at.queue(name, state), "aria-current": state === now && "page"}, `${label} ${count(data[state])}`)),
  h("a", {href: at.queue(name, "usage"), "aria-current": now === "usage" && "page"}, "Usage"));

const ORDER = {
  waiting: ["in the order in which they will run", "the last of the line first"],
  active: ["by the end of their lease", "by the end of their lease, the last first"],
  scheduled: ["the next due first", "the last due first"],
  dead: ["the first to die first", "the last to die first"],
};
const EMPTY = {
  waiting: "Nothing waits.", active: "Nothing runs.", scheduled: "No job waits for a time.", dead: "No dead jobs.",
};

function listing({queue: name, jobs, next, reverse, now, dead}, state, page) {
  const time = {
    waiting: (job) => when(job.updated_at, now, ""), active: (job) => when(job.started_at, now, ""),
    scheduled: (job) => when(job.due_at, now, " late"), dead: (job) => when(job.finished_at, now),
  }[state];
  const head = ["Job", {waiting: "Waits", active: "Runs", scheduled: "Due", dead: "Died"}[state], "Attempt", "Priority", "Owner",
    state === "active" ? "Progress" : "Last error", ""];
  return h("section", {"aria-label": STATES[state]},
    h("div", {class: "bar"},
      h("p", null, `Page ${page}, ${ORDER[state][reverse ? 1 : 0]}. Completed and cancelled jobs are in no list: find them by id.`),
      h("div", {class: "row"}, state === "dead" && dead > 0 && act("retry-all", {queue: name, count: dead}, "Retry all"),
        jobs.length > 0 && act("flip", {}, "Other end first"))),
    jobs.length === 0 ? h("p", {class: "empty"}, next ? "These have just moved on." : EMPTY[state]) : h("table", null,
      h("thead", null, h("tr", null, head.map((text) => h("th", {scope: "col"}, text || h("span", {class: "unseen"}, "Actions"))))),
      h("tbody", null, jobs.map((job) => h("tr", {"data-key": job.id},
        h("td", {class: "id"}, h("a", {class: "mono", href: at.job(name, job.id)}, job.id), job.cancel_requested && h("span", {class: "soft small"}, " cancel asked for")),
        h("td", {class: "num", "data-label": head[1]}, time(job)),
        h("td", {class: "num", "data-label": "Attempt"}, `${job.attempt} of ${job.max_attempts}`),
        h("td", {class: "num", "data-label": "Priority"}, job.priority),
        h("td", {...(job.owner && {"data-label": "Owner"})}, job.owner ?? ""),
        state === "active" ? h("td", {class: "num", "data-label": "Progress"}, `${Math.round(job.progress * 100)} %`)
          : h("td", {class: "error"}, job.error && h("span", {class: "clip", title: job.error}, job.error)),
        h("td", {class: "act"}, state === "dead" ? act("retry", {queue: name, id: job.id}, "Retry") : act("cancel", {queue: name, id: job.id}, "Cancel", "bad")))))),
    h("div", {class: "bar"}, h("p"), h("div", {class: "row"}, page > 1 && act("first", {}, "First page"), next && act("next", {cursor: next}, "Next page"))));
}

function usage({days: found, now}) {
  const axis = Array.from({length: 14}, (_, n) => new Date(now - 86400000 * (13 - n)).toISOString().slice(0, 10));
  const names = [...new Set(Object.values(found).flatMap(Object.keys))];
  if (!names.length) return h("p", {class: "empty"}, "No job of this queue has reported usage in the last 14 days.");
  const total = (name) => Object.values(found).reduce((sum, used) => sum + (used[name] ?? 0), 0);
  return h("div", {class: "grid"}, names.map((name) => h("figure", {class: "card"},
    h("figcaption", null, h("b", null, name), h("span", null, `${plain(total(name))} in 14 days`)), days(found, name, axis),
    h("figcaption", null, h("span", null, axis[0]), h("span", null, axis.at(-1))))));
}

// -- one job ------------------------------------------------------------------------------------------------------

function job(data) {
  const {id, queue: name, now, status, error} = data;
  const over = ENDED.has(status);
  const who = data.workers.find((worker) => worker.id === data.worker);
  const facts = [
    ["Attempt", `${data.attempt} of ${data.max_attempts}${data.starts > data.attempt ? `, ${data.starts} starts` : ""}`],
    ["Priority", data.priority], ["Owner", data.owner],
    ["In line", data.ahead === null ? null : data.ahead === 0 ? "runs next" : `${count(data.ahead)} before it`],
    ["Due", data.due_at && when(data.due_at, now, " late")],
    ["Created", data.created_at && when(data.created_at, now)], ["Latest start", data.started_at && when(data.started_at, now)],
    ["Ended", data.finished_at && when(data.finished_at, now)],
    ["Worker", status === "active" ? who ? `${who.name || who.host}, process ${who.pid}` : data.worker ?? "not known" : null],
    ["Lease", data.lease_until && (data.lease_until > now ? `for ${span(data.lease_until - now)} more` : `lapsed ${span(now - data.lease_until)} ago`)],
    ["Time limit", data.timeout && span(data.timeout)], ["Deadline", data.deadline_at && when(data.deadline_at, now)],
    ["Events kept", data.events], ["Cancel", data.cancel_requested && !over ? "asked for" : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== "");
  return [
    h("p", {class: "crumbs"}, h("a", {href: "#/"}, "Queues"), " / ", h("a", {href: at.queue(name)}, name)),
    h("div", {class: "head"}, h("h1", {class: "id"}, id), pill(status), h("div", {class: "row"},
      status === "failed" && act("retry", {queue: name, id}, "Retry"),
      !over && act("cancel", {queue: name, id}, "Cancel", "bad"))),
    h("section", {class: "card"}, h("h2", null, "Timeline"), timeline(data)),
    error && h("section", {class: "card", "data-key": "error"}, h("h2", null, over && status === "failed" ? "Error" : "Last error"), h("pre", {class: "error"}, error)),
    h("div", {class: "grid"},
      h("section", {class: "card"}, h("h2", null, "Facts"), h("dl", {class: "facts"}, facts.map(([key, value]) => [h("dt", null, key), h("dd", null, value)]))),
      h("div", null,
        h("section", {class: "card"}, h("h2", null, "Usage"), Object.keys(data.usage).length
          ? h("dl", {class: "facts"}, Object.entries(data.usage).map(([key, value]) => [h("dt", null, key), h("dd", null, plain(value))]))
          : h("p", {class: "soft small"}, "It has reported none.")),
        h("section", {class: "card"}, h("h2", null, "Finished steps"), data.steps.length
          ? h("ul", {class: "steps"}, data.steps.map((step) => h("li", {"data-key": step.name}, h("span", {class: "mono"}, step.name), step.value !== undefined && h("pre", null, step.value))))
          : h("p", {class: "soft small"}, "None.")))),
    h("section", {class: "card"}, h("h2", null, "Output"), h("div", {id: "output", "data-keep": true})),
    data.payloads ? h("div", {class: "grid"}, ["payload", "result"].map((key) => h("section", {class: "card"}, h("h2", null, key === "payload" ? "Payload" : "Result"),
      data[key] === null ? h("p", {class: "soft small"}, "None.") : h("pre", null, pretty(data[key])))))
      : h("p", {class: "soft small below", "data-key": "hidden"}, "Payload, result, the values of steps and the words of the output are hidden: this dashboard was not started with payloads."),
  ];
}

function pretty(text) {
  try {
    const value = JSON.parse(text);
    return typeof value === "string" ? value : JSON.stringify(value, null, 2);
  } catch {
    return text;
  }
}

function timeline({created_at: made, started_at: began, finished_at: end, now, status, attempt}) {
  const last = Math.max(end ?? now, made + 1);
  const x = (t) => Math.min(W, Math.max(0, (t - made) / (last - made) * W));
  // A start after the record was given back is a past attempt's: what followed it is waiting again.
  const waits = ["waiting", "scheduled"].includes(status);
  const kind = {completed: "green", failed: "red", cancelled: "pale"}[status] ?? "hot";
  const parts = [["b pale", made, began ?? last], ...(began ? [[waits ? "b pale" : `b ${kind}`, began, last]] : [])];
  const words = began && !waits ? [`${span(began - made)} until ${attempt > 1 ? `attempt ${attempt}` : "it"} began`, `${span(last - began)} ${end ? "of work" : "so far"}`]
    : [`${span(last - made)} without ${attempt ? "an end" : "a start"}`];
  return h("figure", null,
    h("svg:svg", {class: "plot time", viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", role: "img", "aria-label": words.join(", ")},
      parts.map(([name, from, to]) => h("svg:rect", {class: name, x: x(from), y: 0, width: Math.max(1.5, x(to) - x(from)), height: H}))),
    h("figcaption", null, words.map((text) => h("span", null, text))));
}

// -- a job's output, as it comes ------------------------------------------------------------------------------------

let watch = null;

function follow({queue: name, id, payloads}) {
  watch?.close();
  const state = {text: "", values: [], pieces: 0, notes: [], live: "connecting"};
  let due = 0;
  const paint = () => {
    due = 0;
    const box = $("output");
    if (!box) return;
    const draft = h("div", {id: "output"},
      h("p", {class: "small soft", role: "status"}, [state.live, state.attempt && `attempt ${state.attempt}`, `${count(state.pieces)} ${state.pieces === 1 ? "piece" : "pieces"}`,
        state.progress ? `${Math.round(state.progress * 100)} %` : null].filter(Boolean).join(", ")),
      state.notes.map((note) => h("p", {class: "note small"}, note)),
      payloads && state.text && h("pre", {class: "text", tabindex: "0", "aria-label": "Text"}, state.text),
      payloads && state.values.length > 0 && h("pre", {tabindex: "0", "aria-label": "Values"}, state.values.slice(-200).map((value) => JSON.stringify(value)).join("\n")));
    box.removeAttribute("data-keep");
    lay(box, draft);
    box.setAttribute("data-keep", "");
  };
  const take = ({type, data}) => {
    if (type === "chunk") [state.text, state.pieces] = [state.text + data.text, state.pieces + 1];
    if (type === "data") [state.pieces] = [state.pieces + 1, state.values.push(data.value)];
    if (type === "snapshot") Object.assign(state, {text: data.text, values: data.values, pieces: data.values.length + (data.text ? 1 : 0)}, {attempt: data.attempt});
    if (type === "progress") state.progress = data.value;
    if (type === "state") [state.attempt, state.progress, state.status] = [data.attempt, data.progress, data.status];
    if (type === "restarted" || type === "gap") {
      [state.text, state.values, state.pieces] = ["", [], 0];
      state.notes.push(type === "gap" ? "Earlier output is no longer kept." : `Attempt ${data.attempt} started over.`);
      if (type === "restarted") state.attempt = data.attempt;
    }
    if (ENDED.has(type)) {
      state.live = LABEL[type];
      refresh();
    } else if (type === "state" && data.status === "active") state.live = "live";
    else if (type === "state") state.live = LABEL[data.status];
    due ||= requestAnimationFrame(paint);
  };
  watch = watchJob(`api/events?queue=${encodeURIComponent(name)}&id=${encodeURIComponent(id)}`, {
    onEvent: take,
    onConnection: (connection) => {
      if (connection === "lost") state.live = "connection lost, trying again";
      if (connection === "closed" && ["connecting", "live"].includes(state.live)) state.live = "ended";
      due ||= requestAnimationFrame(paint);
    },
  });
  watch.done.catch(() => {});
  paint();
}

// -- going, asking, refreshing --------------------------------------------------------------------------------------

let view = null;
let pages = [null]; // cursors of the pages of a listing, the one that is shown last
let timer = 0;
let asking = null;
let watched = "";

function where() {
  const [path, query = ""] = location.hash.slice(1).split("?");
  const parts = path.split("/").slice(1).map((part) => { try { return decodeURIComponent(part); } catch { return part; } });
  const search = new URLSearchParams(query);
  if (parts[0] === "queue" && parts[1]) {
    const state = parts[2] in STATES || parts[2] === "usage" ? parts[2] : "waiting";
    return {kind: "queue", queue: parts[1], state, reverse: (state === "dead") !== search.has("flip"), flip: search.has("flip")};
  }
  if (parts[0] === "job" && parts[2]) return {kind: "job", queue: parts[1], id: parts[2]};
  if (parts[0] === "find" && parts[1]) return {kind: "find", id: parts[1]};
  return {kind: "queues", after: search.get("after") ?? ""};
}

async function get(name, query, signal) {
  const reply = await fetch(`api/${name}?${new URLSearchParams(query)}`, {headers: {accept: "application/json"}, signal});
  const body = await reply.json().catch(() => ({}));
  if (!reply.ok) throw Object.assign(new Error(body.detail ?? `The server answered ${reply.status}.`), {status: reply.status});
  return body;
}

async function load(signal) {
  const now = view;
  if (now.kind === "queues") {
    const data = await get("queues", {after: now.after}, signal);
    return [data, () => queues(data, now), "outlast"];
  }
  if (now.kind === "queue") {
    const cursor = pages.at(-1);
    const listed = {queue: now.queue, state: now.state, ...(now.reverse && {reverse: ""})};
    // Further pages cost their jobs only; the numbers above them are those of the last look.
    const data = cursor && now.last ? {...now.last, ...await get("queue", {...listed, cursor}, signal)} : now.last = await get("queue", listed, signal);
    return [data, () => queue(data, {state: now.state, page: pages.length}), now.queue];
  }
  if (now.kind === "find") {
    const data = await get("find", {id: now.id}, signal);
    if (data.found.length === 1) {
      location.replace(at.job(data.found[0].queue, now.id));
      return null;
    }
    return [data, () => [
      h("div", {class: "head"}, h("h1", {class: "id"}, now.id)),
      data.found.length ? h("ul", null, data.found.map((one) => h("li", null, h("a", {href: at.job(one.queue, now.id)}, one.queue), " ", pill(one.status))))
        : h("p", {class: "empty"}, `No job has this id in ${data.searched === 1 ? "the queue" : `the ${data.searched} queues`} here: it is unknown, or its record has expired.`),
    ], now.id];
  }
  const data = await get("job", {queue: now.queue, id: now.id}, signal);
  return [data, () => job(data), now.id];
}

async function refresh() {
  clearTimeout(timer);
  asking?.abort();
  const mine = asking = new AbortController();
  const shown = view;
  try {
    const loaded = await load(mine.signal);
    if (mine !== asking || !loaded) return;
    const [data, draw, title] = loaded;
    if (data.billed !== undefined && !often.chosen) $("often").value = data.billed ? "15" : "5";
    document.title = title === "outlast" ? title : `${title} · outlast`;
    lay($("main"), h("main", {id: "main", tabindex: "-1", "data-at": shown.hash}, draw()));
    $("alert").hidden = true;
    const key = shown.kind === "job" ? `${shown.queue}/${shown.id}/${ENDED.has(data.status) ? "" : "goes on"}` : "";
    if (shown.kind === "job" && watched.split("/goes")[0] !== key.split("/goes")[0] || (key.endsWith("goes on") && !watched.endsWith("goes on"))) follow(data);
    watched = key;
  } catch (error) {
    if (mine !== asking || error.name === "AbortError") return;
    $("alert").textContent = error instanceof TypeError ? "The server cannot be reached." : error.message;
    $("alert").hidden = false;
    if (error.status === 404 && shown.kind !== "queues") lay($("main"), h("main", {id: "main", tabindex: "-1"}, h("p", null, h("a", {href: "#/"}, "All queues"))));
  }
  again();
}

function again() {
  clearTimeout(timer);
  const seconds = Number($("often").value);
  if (seconds && !document.hidden && view.kind !== "find") timer = setTimeout(refresh, seconds * 1000);
}

function go() {
  const before = view;
  view = {...where(), hash: location.hash};
  if (view.kind !== "job" || before?.id !== view.id || before?.queue !== view.queue) {
    watch?.close();
    watch = null;
    watched = "";
  }
  pages = [null];
  if (before && before.kind !== view.kind) {
    scrollTo(0, 0);
    $("main").replaceChildren();
    $("main").focus({preventScroll: true});
  }
  refresh();
}

const often = {chosen: false};
try {
  const kept = localStorage.getItem("outlast:often");
  if (kept !== null) [often.chosen, $("often").value] = [true, kept];
} catch {
  // forbidden: the default holds
}
if (!often.chosen) $("often").value = "5";
$("often").addEventListener("change", () => {
  often.chosen = true;
  try { localStorage.setItem("outlast:often", $("often").value); } catch { /* for this visit only */ }
  again();
});
addEventListener("hashchange", go);
document.addEventListener("visibilitychange", () => document.hidden ? clearTimeout(timer) : refresh());
$("skip").addEventListener("click", (event) => {
  event.preventDefault();
  $("main").focus();
});
$("search").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = $("id").value.trim();
  if (!id) return $("id").focus();
  $("id").value = "";
  location.hash = `#/find/${encodeURIComponent(id)}`;
});

// -- changing -----------------------------------------------------------------------------------------------------

let quiet = 0;
function say(text) {
  $("toast").textContent = text;
  clearTimeout(quiet);
  quiet = setTimeout(() => ($("toast").textContent = ""), 5000);
}

async function change(name, body) {
  const reply = await fetch(`api/${name}`, {
    method: "POST", headers: {"content-type": "application/json", "x-outlast-dashboard": "1"}, body: JSON.stringify(body),
  });
  const answer = await reply.json().catch(() => ({}));
  if (!reply.ok) throw new Error(answer.detail ?? `The server answered ${reply.status}.`);
  return answer;
}

function sure(title, text, yes) {
  $("ask-title").textContent = title;
  $("ask-text").textContent = text;
  $("ask-yes").textContent = yes;
  $("ask").returnValue = "";
  $("ask").showModal();
  return new Promise((resolve) => $("ask").addEventListener("close", () => resolve($("ask").returnValue === "yes"), {once: true}));
}
$("ask-yes").addEventListener("click", () => $("ask").close("yes"));
$("ask-no").addEventListener("click", () => $("ask").close(""));

const acts = {
  async cancel({queue: name, id}) {
    if (!await sure("Cancel this job?", id, "Cancel the job")) return;
    say((await change("cancel", {queue: name, id})).done ? "Cancelled." : "It had ended already.");
  },
  async retry({queue: name, id}) {
    say((await change("retry", {queue: name, id})).done ? "It is back to work." : "It is not dead any more.");
  },
  async "retry-all"({queue: name, count: dead}) {
    if (!await sure("Retry all dead jobs?", `About ${dead} jobs of ${name} run again, with a fresh count of attempts.`, "Retry all")) return;
    let [batch, total] = [{}, 0];
    do {
      batch = await change("retry-all", {queue: name, cursor: batch.cursor, before: batch.before});
      total += batch.retried;
      say(`${total} are back to work${batch.cursor ? "…" : "."}`);
    } while (batch.cursor);
  },
  async pause({queue: name}) {
    await change("pause", {queue: name});
    say("Paused. What runs goes on.");
  },
  async resume({queue: name}) {
    await change("resume", {queue: name});
    say("Resumed.");
  },
  next: ({cursor}) => void pages.push(cursor),
  first: () => void (pages = [null]),
  flip: () => void (location.hash = at.queue(view.queue, view.state, view.flip ? "" : "?flip")),
};

document.addEventListener("click", async ({target}) => {
  const button = target.closest("[data-act]");
  if (!button || button.disabled) return;
  const {act: name, ...data} = button.dataset;
  button.disabled = true;
  try {
    await acts[name](data);
    await refresh();
  } catch (error) {
    $("alert").textContent = error instanceof TypeError ? "Not done: the server cannot be reached." : `Not done: ${error.message}`;
    $("alert").hidden = false;
  } finally {
    button.disabled = false;
  }
});

go();
