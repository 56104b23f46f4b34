// Everything under /api/outlast is passed on to outlast-edge, in the name of the user who is signed in here. So the
// browser talks to one origin, and nobody but this server knows the edge's secret.
import { user } from "../../../../lib/user.ts";

const BASE = "/api/outlast";
const SENT = ["accept", "content-type", "idempotency-key", "if-none-match", "last-event-id"];
const ANSWERED = [
  "cache-control",
  "content-type",
  "etag",
  "location",
  "retry-after",
  "vary",
  "x-accel-buffering",
  "x-content-type-options",
  "x-vercel-ai-ui-message-stream",
  "x-workflow-run-id",
  "x-workflow-stream-tail-index",
];

// A stream lasts as long as the platform allows; the edge ends it before (Edge(max_stream=…)) and the viewer comes back.
export const maxDuration = 300;
export const dynamic = "force-dynamic";

async function pass(request: Request): Promise<Response> {
  const name = await user(request);
  if (name === null) return new Response("Sign in first.", { status: 401 });
  const asked = new URL(request.url);
  // The path as it was escaped: an id may hold a slash.
  const target = process.env.OUTLAST_EDGE_URL + asked.pathname.slice(BASE.length) + asked.search;
  const headers = copied(request.headers, SENT);
  headers.set("authorization", `Bearer ${process.env.OUTLAST_EDGE_SECRET}`);
  headers.set("x-user", name);
  const answer = await fetch(target, {
    method: request.method,
    headers,
    body: request.method === "POST" ? await request.arrayBuffer() : undefined,
    signal: request.signal, // when the viewer leaves, so do we; the job goes on
    cache: "no-store",
    redirect: "manual",
  });
  const answered = copied(answer.headers, ANSWERED);
  const location = answered.get("location");
  if (location?.startsWith("/")) answered.set("location", BASE + location);
  return new Response(answer.body, { status: answer.status, headers: answered });
}

function copied(from: Headers, names: string[]): Headers {
  return new Headers(names.flatMap((name) => (from.has(name) ? [[name, from.get(name)!] as [string, string]] : [])));
}

export { pass as GET, pass as HEAD, pass as POST };
