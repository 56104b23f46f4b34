// A job made without any Python in between: one round trip to Upstash. It is watched and cancelled through
// /api/outlast/v1/queues/generate/jobs/{id}…, like any other.
import { connect, Queue } from "../../../lib/outlast.ts";
import { user } from "../../../lib/user.ts";

const generate = new Queue(connect(), "generate");

export async function POST(request: Request): Promise<Response> {
  const owner = await user(request);
  if (owner === null) return new Response("Sign in first.", { status: 401 });
  const { prompt } = (await request.json()) as { prompt: string };
  // One click is one job, however often the request is sent: the page makes the key.
  const key = request.headers.get("idempotency-key");
  const job = await generate.enqueue(
    { prompt: String(prompt) },
    { owner, ...(key ? { idempotencyKey: `${owner}:${key}` } : {}) },
  );
  const url = `/api/outlast/v1/queues/generate/jobs/${job.id}`;
  return Response.json({ ...job, url, events_url: `${url}/events`, cancel_url: `${url}/cancel` }, { status: 202 });
}
