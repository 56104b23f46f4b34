// Follows a job of outlast to its end, across any number of connections.
//
//   import {watchJob} from "/v1/watch.js";
//
//   const watch = watchJob(job.events_url, {
//     onEvent({type, data, id}) {
//       if (type === "chunk") text += data.text;
//       if (type === "restarted" || type === "gap") text = "";   // what came before no longer counts
//     },
//   });
//   const end = await watch.done;     // {type: "completed" | "failed" | "cancelled", data, id}
//
// Options
//   onEvent       called for each event: state, chunk, data, progress, restarted, gap, snapshot, completed, failed, cancelled
//   onConnection  called with "open", "lost" (it is tried again by itself) and "closed"
//   after         the cursor to resume after: watch.cursor, or the id of the last event that you kept
//   poll          true asks for pages of JSON in place of a stream: for platforms that hold streams back
//   headers, credentials, fetch   for the requests;  signal  an AbortSignal that closes the watch
//   quiet         milliseconds without a byte after which a connection counts as dead (45,000)
// url may be a function, also async, that is asked before each connection: for tokens that expire.
//
// watch.close() ends it. watch.done then gives null, as it does for a job whose record has gone by the time it comes
// back; it rejects with an error that has `status` when the server refuses for good (unknown job, no right, bad cursor).

const ENDS = new Set(["completed", "failed", "cancelled"]);
const PASSING = new Set([408, 425, 429]);

export function watchJob(url, options = {}) {
  const {onEvent, onConnection, after = null, poll = false, headers = {}, quiet = 45000, signal} = options;
  const {credentials = "same-origin", fetch = globalThis.fetch.bind(globalThis)} = options;
  let cursor = after;
  let retry = 1000;
  let faults = 0;
  let asked = false; // whether the server asked us to come back
  let closed = false;
  let connection = null;
  let wake = () => {};
  let heard = 0;
  let state = "";
  let finish, refuse;
  const done = new Promise((resolve, reject) => ([finish, refuse] = [resolve, reject]));
  done.catch(() => {}); // a caller that does not look at `done` has nothing unhandled

  function call(listener, value) {
    try {
      listener?.(value);
    } catch (error) {
      queueMicrotask(() => { throw error; }); // the page's fault, not the connection's
    }
  }

  function end(settle, value) {
    if (closed) return;
    closed = true;
    connection?.abort();
    wake();
    globalThis.removeEventListener?.("online", hurry);
    globalThis.document?.removeEventListener("visibilitychange", look);
    signal?.removeEventListener("abort", close);
    call(onConnection, "closed");
    settle(value);
  }

  const close = () => end(finish, null);
  const hurry = () => wake();
  const look = () => {
    if (document.hidden) return;
    // A tab that was asleep may hold a connection that died meanwhile.
    if (Date.now() - heard > 20000) connection?.abort();
    wake();
  };

  function take(event) {
    if (closed) return;
    if (event.id) cursor = event.id;
    faults = 0;
    if (event.type === "reconnect") asked = event.data.reason !== "unavailable";
    else call(onEvent, event);
    if (ENDS.has(event.type)) end(finish, event);
  }

  async function connect() {
    const where = new URL(typeof url === "function" ? await url() : url, globalThis.location?.href);
    if (cursor) where.searchParams.set("after", cursor);
    if (poll) where.searchParams.set("wait", "20");
    connection = new AbortController();
    const accept = poll ? "application/json" : "text/event-stream";
    const life = watchdog();
    try {
      const response = await fetch(where, {
        headers: {...headers, accept}, credentials, cache: "no-store", signal: connection.signal,
      });
      if (closed) return;
      if (response.status === 204) return end(finish, null);
      if (response.status >= 400 && response.status < 500 && !PASSING.has(response.status)) {
        const error = new Error(`outlast: ${response.status} for the events of a job`);
        error.status = response.status;
        return end(refuse, error);
      }
      if (!response.ok || !response.headers.get("content-type")?.startsWith(accept)) {
        retry = 1000 * (Number(response.headers.get("retry-after")) || 0);
        throw new Error("not now");
      }
      asked = poll;
      call(onConnection, "open");
      await (poll ? page(await response.json()) : stream(response.body.getReader(), life));
    } finally {
      life.stop();
    }
  }

  function watchdog() {
    let timer;
    const mine = connection;
    const beat = () => {
      heard = Date.now();
      clearTimeout(timer);
      timer = setTimeout(() => mine.abort(), quiet);
    };
    beat();
    return {beat, stop: () => clearTimeout(timer)};
  }

  function page({events, next, done: last, retry_after_ms, state: now}) {
    if (JSON.stringify(now) !== state) take({type: "state", data: now, id: null});
    state = JSON.stringify(now);
    events.forEach(take);
    cursor = next ?? cursor;
    retry = events.length ? 0 : retry_after_ms;
    if (last) end(finish, null);
  }

  async function stream(reader, life) {
    const decoder = new TextDecoder();
    let rest = "";
    let fields = {};
    while (!closed) {
      const {value, done: over} = await reader.read();
      if (over) return;
      life.beat();
      const lines = (rest + decoder.decode(value, {stream: true})).split(/\r\n|\n|\r(?!$)/);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (fields.retry) retry = Number(fields.retry);
          if (fields.data !== undefined) {
            take({type: fields.event ?? "message", data: JSON.parse(fields.data), id: fields.id ?? null});
          }
          fields = {};
          continue;
        }
        const [, name, text] = /^([^:]*):? ?(.*)$/s.exec(line);
        fields[name] = name === "data" && fields.data !== undefined ? `${fields.data}\n${text}` : text;
      }
    }
  }

  async function run() {
    while (!closed) {
      try {
        await connect();
      } catch {
        faults += 1;
        asked = false;
      }
      if (closed) return;
      if (!asked) call(onConnection, "lost");
      // The first try after a connection that worked follows the server's word, the next ones ever more slowly.
      const backoff = faults > 1 ? Math.min(30000, 500 * 2 ** faults) * (0.5 + Math.random() / 2) : 0;
      const pause = Math.max(retry, backoff);
      if (pause > 0) {
        await new Promise((resolve) => {
          const timer = setTimeout(resolve, pause);
          wake = () => { clearTimeout(timer); resolve(); };
        });
      }
    }
  }

  globalThis.addEventListener?.("online", hurry);
  globalThis.document?.addEventListener("visibilitychange", look);
  if (signal?.aborted) queueMicrotask(close);
  signal?.addEventListener("abort", close);
  run();
  return {close, done, get cursor() { return cursor; }};
}
