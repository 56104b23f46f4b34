// Makes, cancels and reads jobs of an outlast queue over @upstash/redis: with the very scripts that the Python clients
// run, so that a Python worker sees no difference.
import { Redis } from "@upstash/redis";
import { CANCEL, ENQUEUE, LARGE, type Script } from "./scripts.generated.ts";

export interface EnqueueOptions {
  /** Your own instead of a random one. It may be used again once its job has finished. */
  id?: string;
  /** The job that holds it already is the answer; it is held while the job lives, and after it completes. */
  idempotencyKey?: string;
  /** Whose job this is, for `authorize` of outlast-edge. */
  owner?: string;
  /** 0 to 9, 9 first. */
  priority?: number;
  /** Seconds until it may start. */
  delay?: number;
  maxAttempts?: number;
}

export interface Enqueued {
  id: string;
  /** The idempotency key belonged to a job, and this is that job. */
  deduplicated: boolean;
}

export interface Job {
  status: "waiting" | "scheduled" | "active" | "completed" | "failed" | "cancelled";
  /** Of a completed job. */
  result: unknown;
  error: string | null;
  attempt: number;
  owner: string | null;
}

/** A client that leaves replies as they are: by default an id of digits would come back as a number, and cut short. */
export function connect(): Redis {
  return Redis.fromEnv({ automaticDeserialization: false });
}

/** Seconds, as the queue is declared on the Python side. */
export interface Declaration {
  resultTtl?: number;
  maxAttempts?: number;
  namespace?: string;
}

export class Queue {
  readonly base: string;
  private readonly redis: Redis;
  private readonly resultTtlMs: number;
  private readonly maxAttempts: number;

  constructor(redis: Redis, name: string, declaration: Declaration = {}) {
    const namespace = declaration.namespace ?? process.env.OUTLAST_NAMESPACE;
    this.base = `{${namespace ? `${namespace}.` : ""}${name}}:`;
    this.redis = redis;
    this.resultTtlMs = (declaration.resultTtl ?? 3600) * 1000;
    this.maxAttempts = declaration.maxAttempts ?? 3;
  }

  async enqueue(payload: unknown, options: EnqueueOptions = {}): Promise<Enqueued> {
    const id = options.id ?? random(16);
    const delayMs = Math.ceil((options.delay ?? 0) * 1000);
    const own = options.id !== undefined;
    const key = options.idempotencyKey ?? "";
    const text = JSON.stringify(payload);
    const large = new TextEncoder().encode(text).length > LARGE;
    const answer = await this.run(
      ENQUEUE,
      {
        job: `job:${id}`,
        signal: "signal",
        lane: delayMs > 0 ? "scheduled" : "ready",
        ...(delayMs > 0 ? {} : { seq: "seq" }),
        ...(own ? { events: `events:${id}`, dead: "dead", steps: `steps:${id}` } : {}),
        ...(key ? { idem: `idem:${key}` } : {}),
        ...(large ? { config: "config" } : {}),
      },
      {
        now: "", // the server's clock
        id,
        nonce: own || key ? random(12) : "", // tells a repeat of this call, whose reply was lost, from another call
        payload: text,
        max_attempts: String(options.maxAttempts ?? this.maxAttempts),
        priority: String(options.priority ?? 0),
        delay_ms: String(delayMs),
        own: own ? "1" : "0",
        key,
        key_ttl_ms: String(this.resultTtlMs),
        hash: "", // whether the same key came with the same payload is not checked
        expires_ms: "",
        deadline_ms: "",
        schedule: "",
        due: "",
      },
      options.owner === undefined ? [] : ["owner", options.owner],
    );
    const [code, value] = answer as [string, string];
    if (code === "in_use") throw new Error(`job ${id} is still ${value}`);
    if (code === "too_large") throw new Error(`the queue takes payloads of at most ${value} bytes`);
    return { id: value, deduplicated: code === "duplicate" };
  }

  /** Stop a job. True: it will give no result. False: it has completed or failed, or is unknown. */
  async cancel(id: string): Promise<boolean> {
    const answer = await this.run(
      CANCEL,
      { job: `job:${id}`, events: `events:${id}`, ready: "ready", scheduled: "scheduled", config: "config", absent: "absent" },
      { now: "", id, result_ttl_ms: String(this.resultTtlMs), base: this.base, relief: "0", ctl_ttl_ms: "600000", before: "" },
    );
    return answer === "cancelled" || answer === "requested";
  }

  async get(id: string): Promise<Job | null> {
    const fields = ["id", "status", "result", "error", "attempt", "owner"];
    // Replies come as the database gives them (see connect): a list, not the SDK's object.
    const found: unknown = await this.redis.hmget(`${this.base}job:${id}`, ...fields);
    const [known, status, result, error, attempt, owner] = found as (string | null)[];
    if (known === null) return null;
    return {
      status: (status ?? "waiting") as Job["status"],
      result: status === "completed" ? JSON.parse(result ?? "null") : undefined,
      error,
      attempt: Number(attempt),
      owner,
    };
  }

  private async run(
    script: Script,
    keys: Record<string, string>,
    args: Record<string, string>,
    pairs: string[] = [],
  ): Promise<unknown> {
    const KEYS = script.keys
      .filter((name) => !name.endsWith("?") || name.slice(0, -1) in keys)
      .map((name) => this.base + named(keys, name.replace("?", "")));
    const ARGV = script.argv.flatMap((name) => (name.endsWith("...") ? pairs : [named(args, name)]));
    try {
      return await this.redis.evalsha(script.sha, KEYS, ARGV);
    } catch (error) {
      if (!String(error).includes("NOSCRIPT")) throw error;
      return await this.redis.eval(script.source, KEYS, ARGV);
    }
  }
}

function named(values: Record<string, string>, name: string): string {
  const value = values[name];
  if (value === undefined) throw new Error(`the scripts want ${name}: lib/outlast.ts is older than they are`);
  return value;
}

function random(bytes: number): string {
  const values = crypto.getRandomValues(new Uint8Array(bytes));
  return Array.from(values, (value) => value.toString(16).padStart(2, "0")).join("");
}
