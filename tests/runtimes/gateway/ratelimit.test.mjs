// @upstash/ratelimit, unmodified: each algorithm on one region and on several; its scripts carry flags=allow-key-locking.
import assert from "node:assert/strict";
import { beforeEach, test } from "node:test";
import { MultiRegionRatelimit, Ratelimit } from "@upstash/ratelimit";
import { Redis } from "@upstash/redis";

const options = { url: process.env.GATEWAY_URL, retry: { retries: 0 }, enableAutoPipelining: process.env.ONE_BY_ONE !== "1" };
const redis = new Redis({ ...options, token: process.env.GATEWAY_TOKEN });
const second = new Redis({ ...options, token: process.env.GATEWAY_TOKEN_2 });
const algorithms = {
  fixedWindow: () => Ratelimit.fixedWindow(3, "60 s"),
  slidingWindow: () => Ratelimit.slidingWindow(3, "60 s"),
  tokenBucket: () => Ratelimit.tokenBucket(3, "60 s", 3),
};

beforeEach(() => Promise.all([redis.flushdb(), second.flushdb()]));

for (const [name, limiter] of Object.entries(algorithms)) {
  test(`${name} lets three of five through, also when the scripts are gone`, async () => {
    const limit = new Ratelimit({ redis, limiter: limiter(), prefix: name, ephemeralCache: false });
    await redis.scriptFlush({ async: false });
    const answers = [];
    for (let n = 0; n < 5; n++) answers.push((await limit.limit("user")).success);
    assert.deepEqual(answers, [true, true, true, false, false]);
    assert.equal((await limit.getRemaining("user")).remaining, 0);
    assert.equal((await limit.limit("another")).success, true);
    await redis.scriptFlush({ async: false });
    await limit.resetUsedTokens("user");
    assert.equal((await limit.limit("user")).success, true);
  });
}

test("requests at once share the limit exactly", async () => {
  const limit = new Ratelimit({ redis, limiter: Ratelimit.fixedWindow(10, "60 s"), prefix: "many", ephemeralCache: false });
  const answers = await Promise.all(Array.from({ length: 40 }, () => limit.limit("user")));
  assert.equal(answers.filter(({ success }) => success).length, 10);
});

test("a dynamic limit takes the place of the built-in one", async () => {
  const limit = new Ratelimit({ redis, limiter: Ratelimit.fixedWindow(3, "60 s"), prefix: "dynamic", dynamicLimits: true, ephemeralCache: false });
  await limit.setDynamicLimit({ limit: 1 });
  assert.deepEqual([(await limit.limit("user")).success, (await limit.limit("user")).success], [true, false]);
});

test("analytics are written", async () => {
  const limit = new Ratelimit({ redis, limiter: Ratelimit.fixedWindow(3, "60 s"), prefix: "seen", analytics: true, ephemeralCache: false });
  const allowed = await limit.limit("user");
  await allowed.pending;
  assert.equal(allowed.success, true);
  assert.ok((await redis.keys("seen:events:*")).length > 0);
});

for (const name of ["fixedWindow", "slidingWindow"]) {
  test(`${name} over two regions`, async () => {
    const limit = new MultiRegionRatelimit({
      redis: [redis, second],
      limiter: MultiRegionRatelimit[name](2, "60 s"),
      prefix: `regions-${name}`,
      ephemeralCache: false,
    });
    const answers = [];
    for (let n = 0; n < 4; n++) {
      const answer = await limit.limit("user");
      await answer.pending;
      answers.push(answer.success);
    }
    assert.deepEqual(answers, [true, true, false, false]);
  });
}
