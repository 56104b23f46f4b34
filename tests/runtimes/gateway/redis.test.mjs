// @upstash/redis, unmodified: every data type that it offers except JSON, search and what only Redis 8 has.
import assert from "node:assert/strict";
import { after, beforeEach, test } from "node:test";
import { Redis } from "@upstash/redis";

const connection = { url: process.env.GATEWAY_URL, token: process.env.GATEWAY_TOKEN, retry: { retries: 0 } };
const redis = new Redis({ ...connection, enableAutoPipelining: process.env.ONE_BY_ONE !== "1" }); // its default: true
const plain = new Redis({ ...connection, responseEncoding: false, automaticDeserialization: false });
const single = new Redis({ ...connection, enableAutoPipelining: false }); // one request a command
const { equal, deepEqual, ok, rejects } = assert;

beforeEach(() => redis.flushdb());
after(() => redis.flushdb());

test("strings", async () => {
  equal(await redis.set("k", "v"), "OK");
  equal(await redis.get("k"), "v");
  equal(await redis.set("k", "w", { nx: true }), null);
  equal(await redis.set("k", "w", { get: true }), "v");
  equal(await redis.set("k", "OK", { ex: 100 }), "OK");
  equal(await redis.get("k"), "OK");
  ok((await redis.ttl("k")) > 0);
  equal(await redis.append("k", "!"), 3);
  equal(await redis.strlen("k"), 3);
  equal(await redis.getrange("k", 0, 1), "OK");
  equal(await redis.setrange("k", 0, "ok"), 3);
  equal(await redis.getset("k", "x"), "ok!");
  equal(await redis.getex("k", { persist: true }), "x");
  equal(await redis.ttl("k"), -1);
  equal(await redis.getdel("k"), "x");
  equal(await redis.get("k"), null);
  equal(await redis.setnx("k", "v"), 1);
  equal(await redis.setex("k", 10, "v"), "OK");
  equal(await redis.psetex("k", 10_000, "v"), "OK");
  equal(await redis.mset({ a: 1, b: "zwei" }), "OK");
  deepEqual(await redis.mget("a", "b", "none"), [1, "zwei", null]);
  equal(await redis.msetnx({ b: 1, c: 2 }), 0);
});

test("values keep their kind through the SDK's own (de)serialisation, and their text without it", async () => {
  for (const value of ["text", 1.5, true, { a: [1, null, "x"] }, [], "ünïcödé 🎉\n\"'\\", "a\u0000b"]) {
    await redis.set("k", value);
    deepEqual(await redis.get("k"), value);
  }
  await plain.set("k", "9007199254740993");
  equal(await plain.get("k"), "9007199254740993");
  await plain.set("k", "ünï");
  equal(await plain.get("k"), "ünï");
});

test("numbers", async () => {
  deepEqual([await redis.incr("n"), await redis.incrby("n", 9), await redis.decr("n"), await redis.decrby("n", 4)], [1, 10, 9, 5]);
  equal(await redis.incrbyfloat("n", 0.25), 5.25);
});

test("bits", async () => {
  equal(await redis.setbit("b", 7, 1), 0);
  equal(await redis.getbit("b", 7), 1);
  equal(await redis.bitcount("b", 0, -1), 1);
  equal(await redis.bitpos("b", 1), 7);
  equal(await redis.bitop("not", "c", "b"), 1);
  deepEqual(await single.bitfield("f").set("u8", 0, 200).incrby("u8", 0, 100).overflow("SAT").incrby("u8", 0, 250).exec(), [0, 44, 255]);
});

test("keys", async () => {
  await redis.mset({ "key:1": 1, "key:2": 2, other: 3 });
  deepEqual((await redis.keys("key:*")).sort(), ["key:1", "key:2"]);
  equal(await redis.exists("key:1", "none"), 1);
  equal(await redis.dbsize(), 3);
  ok(["key:1", "key:2", "other"].includes(await redis.randomkey()));
  equal(await redis.type("key:1"), "string");
  equal(await redis.rename("key:1", "key:3"), "OK");
  equal(await redis.renamenx("key:3", "key:2"), 0);
  equal(await redis.copy("key:2", "key:4"), "COPIED");
  equal(await redis.touch("key:2", "key:4"), 2);
  const found = [];
  let cursor = "0";
  do {
    const [next, page] = await redis.scan(cursor, { match: "key:*", count: 1 });
    cursor = next;
    found.push(...page);
  } while (cursor !== "0");
  deepEqual(found.sort(), ["key:2", "key:3", "key:4"]);
  const now = Math.floor(Date.now() / 1000);
  equal(await redis.expire("other", 100), 1);
  equal(await redis.expire("other", 50, "GT"), 0);
  equal(await redis.pexpire("other", 100_000), 1);
  equal(await redis.expireat("other", now + 100), 1);
  equal(await redis.pexpireat("other", (now + 100) * 1000), 1);
  ok((await redis.pttl("other")) > 0);
  equal(await redis.persist("other"), 1);
  equal(await redis.del("other", "none"), 1);
  equal(await redis.unlink("key:2", "key:3", "key:4"), 3);
});

test("hashes", async () => {
  equal(await redis.hset("h", { f: "v", g: 1, o: { deep: [true] } }), 3);
  equal(await redis.hget("h", "f"), "v");
  deepEqual(await redis.hgetall("h"), { f: "v", g: 1, o: { deep: [true] } });
  equal(await redis.hgetall("none"), null);
  deepEqual(await redis.hmget("h", "f", "none"), { f: "v", none: null });
  equal(await redis.hmset("h", { f: "w" }), "OK");
  equal(await redis.hexists("h", "f"), 1);
  equal(await redis.hsetnx("h", "f", "x"), 0);
  equal(await redis.hincrby("h", "g", 2), 3);
  equal(await redis.hincrbyfloat("h", "g", 0.5), 3.5);
  deepEqual((await redis.hkeys("h")).sort(), ["f", "g", "o"]);
  equal((await redis.hvals("h")).length, 3);
  equal(await redis.hlen("h"), 3);
  equal(await redis.hstrlen("h", "f"), 1);
  deepEqual(await redis.hrandfield("h", 3, true), { f: "w", g: 3.5, o: { deep: [true] } });
  deepEqual((await redis.hscan("h", 0, { match: "f" }))[1], ["f", "w"]);
  deepEqual(await redis.hexpire("h", "f", 100), [1]);
  ok((await redis.httl("h", "f"))[0] > 0);
  deepEqual(await redis.hpersist("h", "f"), [1]);
  equal(await redis.hdel("h", "f", "none"), 1);
});

test("lists", async () => {
  equal(await redis.rpush("l", "b", "c"), 2);
  equal(await redis.lpush("l", "a"), 3);
  deepEqual(await redis.lrange("l", 0, -1), ["a", "b", "c"]);
  equal(await redis.lindex("l", 9), null);
  equal(await redis.linsert("l", "before", "c", "bc"), 4);
  equal(await redis.lpos("l", "bc"), 2);
  equal(await redis.lset("l", 0, "A"), "OK");
  equal(await redis.lrem("l", 1, "bc"), 1);
  equal(await redis.lmove("l", "m", "left", "right"), "A");
  deepEqual(await redis.lmpop(2, ["none", "m"], "LEFT"), ["m", ["A"]]);
  equal(await redis.ltrim("l", 0, 0), "OK");
  equal(await redis.lpop("l"), "b");
  equal(await redis.rpop("l"), null);
  deepEqual([await redis.lpushx("none", 1), await redis.rpushx("none", 1), await redis.llen("none")], [0, 0, 0]);
});

test("sets", async () => {
  equal(await redis.sadd("s", "a", "b", "c"), 3);
  await redis.sadd("t", "b", "d");
  equal(await redis.scard("s"), 3);
  equal(await redis.sismember("s", "a"), 1);
  deepEqual(await redis.smismember("s", ["a", "z"]), [1, 0]);
  deepEqual((await redis.smembers("s")).sort(), ["a", "b", "c"]);
  deepEqual((await redis.sunion("s", "t")).sort(), ["a", "b", "c", "d"]);
  deepEqual(await redis.sinter("s", "t"), ["b"]);
  deepEqual((await redis.sdiff("s", "t")).sort(), ["a", "c"]);
  equal(await redis.sintercard(["s", "t"]), 1);
  deepEqual([await redis.sunionstore("u", "s", "t"), await redis.sinterstore("i", "s", "t"), await redis.sdiffstore("d", "s", "t")], [4, 1, 2]);
  equal(await redis.smove("s", "t", "a"), 1);
  equal(await redis.srandmember("i"), "b");
  deepEqual(await redis.sscan("i", 0), ["0", ["b"]]);
  equal(await redis.srem("s", "b"), 1);
  equal(await redis.spop("s"), "c");
});

test("sorted sets", async () => {
  equal(await redis.zadd("z", { score: 1, member: "a" }, { score: 2.5, member: "b" }, { score: "+inf", member: "c" }), 3);
  equal(await redis.zadd("z", { xx: true, gt: true, ch: true }, { score: 2, member: "a" }), 1);
  equal(await redis.zscore("z", "a"), 2);
  deepEqual(await redis.zmscore("z", ["a", "none"]), [2, null]);
  deepEqual(await redis.zrange("z", 0, 1, { withScores: true }), ["a", 2, "b", 2.5]);
  deepEqual(await redis.zrange("z", 1, "(inf", { byScore: true, offset: 1, count: 1 }), ["b"]);
  deepEqual(await redis.zrange("z", 0, -1, { rev: true }), ["c", "b", "a"]);
  deepEqual([await redis.zrank("z", "b"), await redis.zrevrank("z", "b"), await redis.zrank("z", "none")], [1, 1, null]);
  deepEqual([await redis.zcard("z"), await redis.zcount("z", 1, 3), await redis.zlexcount("z", "-", "+")], [3, 2, 3]);
  equal(await redis.zincrby("z", 1.5, "b"), 4);
  await redis.zadd("y", { score: 10, member: "a" });
  deepEqual(await redis.zunion(2, ["z", "y"], { withScores: true, aggregate: "max" }), ["b", 4, "a", 10, "c", "inf"]);
  deepEqual([await redis.zunionstore("u", 2, ["z", "y"]), await redis.zinterstore("i", 2, ["z", "y"]), await redis.zdiffstore("d", 2, "z", "y")], [3, 1, 2]);
  deepEqual(await redis.zscan("i", 0), ["0", ["a", 12]]);
  deepEqual(await redis.zpopmin("y"), ["a", 10]);
  deepEqual(await redis.zpopmax("i"), ["a", 12]);
  equal(await redis.zrem("z", "a"), 1);
  deepEqual([await redis.zremrangebyrank("u", 0, 0), await redis.zremrangebyscore("u", 0, 100), await redis.zremrangebylex("u", "-", "+")], [1, 1, 1]);
});

test("places and sketches", async () => {
  equal(await redis.geoadd("g", { longitude: 13.361389, latitude: 38.115556, member: "Palermo" }, { longitude: 15.087269, latitude: 37.502669, member: "Catania" }), 2);
  equal(Math.round(await redis.geodist("g", "Palermo", "Catania", "KM")), 166);
  deepEqual(await redis.geohash("g", "Palermo"), ["sqc8b49rny0"]);
  equal(Math.round((await redis.geopos("g", "Palermo"))[0].lng), 13);
  const near = await redis.geosearch("g", { type: "FROMLONLAT", coordinate: { lon: 15, lat: 37 } }, { type: "BYRADIUS", radius: 200, radiusType: "KM" }, "ASC", { withDist: true });
  deepEqual(near.map(({ member }) => member), ["Catania", "Palermo"]);
  equal(await redis.pfadd("p", "a", "b"), 1);
  equal(await redis.pfcount("p"), 2);
  equal(await redis.pfmerge("q", "p"), "OK");
});

test("streams", async () => {
  equal(await redis.xadd("x", "1-1", { f: "v" }), "1-1");
  equal(await redis.xadd("x", "2-1", { f: "OK" }, { trim: { type: "MAXLEN", threshold: 10, comparison: "=" } }), "2-1");
  equal(await redis.xlen("x"), 2);
  deepEqual(await redis.xrange("x", "-", "+"), { "1-1": { f: "v" }, "2-1": { f: "OK" } });
  deepEqual(await redis.xrevrange("x", "+", "-", 1), { "2-1": { f: "OK" } });
  deepEqual(await redis.xread("x", "1-1"), [["x", [["2-1", ["f", "OK"]]]]]);
  equal(await redis.xread("x", "2-1"), null);
  equal(await redis.xgroup("x", { type: "CREATE", group: "g", id: "0" }), "OK");
  deepEqual(await redis.xreadgroup("g", "c", "x", ">", { count: 1 }), [["x", [["1-1", ["f", "v"]]]]]);
  equal((await redis.xpending("x", "g", "-", "+", 10))[0][0], "1-1");
  deepEqual(await redis.xclaim("x", "g", "d", 0, "1-1", { justId: true }), ["1-1"]);
  equal((await redis.xautoclaim("x", "g", "c", 0, "0-0"))[1].length, 1);
  equal(await redis.xack("x", "g", "1-1"), 1);
  equal((await redis.xinfo("x", { type: "GROUPS" }))[0][1], "g");
  equal(await redis.xdel("x", "1-1"), 1);
  equal(await redis.xtrim("x", { strategy: "MAXLEN", threshold: 0, exactness: "=" }), 1);
});

test("scripts", async () => {
  deepEqual(await redis.eval("return {KEYS[1], ARGV[1], false, 3.7, redis.status_reply('OK')}", ["k"], ["v"]), ["k", "v", null, 3, "OK"]);
  equal(await redis.evalRo("return 1", [], []), 1);
  const sha = await redis.scriptLoad("return ARGV[1]");
  equal(await redis.evalsha(sha, [], ["now"]), "now");
  deepEqual(await redis.scriptExists(sha, "0".repeat(40)), [1, 0]);
  equal(await redis.scriptFlush({ async: false }), "OK");
  await rejects(redis.evalsha(sha, [], []), /NOSCRIPT No matching script\. Please use EVAL\./);
  const script = redis.createScript("return 'again ' .. ARGV[1]");
  equal(await script.exec([], ["1"]), "again 1"); // EVALSHA, NOSCRIPT, EVAL
  equal(await script.exec([], ["2"]), "again 2");
  const flagged = redis.createScript("#!lua flags=allow-key-locking\nreturn redis.call('INCR', KEYS[1])");
  deepEqual([await flagged.exec(["n"], []), await flagged.exec(["n"], [])], [1, 2]);
  await redis.scriptFlush({ async: false });
  equal(await flagged.exec(["n"], []), 3);
});

test("pipelines and transactions", async () => {
  for (const batch of [redis.pipeline(), redis.multi()]) {
    batch.set("k", "OK").get("k").hset("h", { f: 1 }).hgetall("h").incr("h");
    const slots = await batch.exec({ keepErrors: true });
    deepEqual(slots.slice(0, 4).map(({ result }) => result), ["OK", "OK", slots[2].result, { f: 1 }]);
    ok(slots[4].error.startsWith("WRONGTYPE"));
  }
  await rejects(redis.pipeline().set("k", "v").incr("k").exec(), /ERR value is not an int or out of range/);
  await rejects(redis.multi().set("k", "v").eval("", [], []).hget("k").exec(), /ERR/);
  const pairs = await Promise.all(Array.from({ length: 30 }, () => redis.multi().incr("n").incr("n").exec()));
  ok(pairs.every(([a, b]) => b === a + 1));
});

test("commands of one turn are sent as one pipeline", async () => {
  const auto = new Redis({ ...connection, enableAutoPipelining: true });
  deepEqual(await Promise.all([auto.set("k", "v"), auto.incr("n"), auto.incr("n")]), ["OK", 1, 2]);
  equal(auto.pipelineCounter, 1);
});

test("connection, errors and tokens", async () => {
  equal(await redis.ping(), "PONG");
  equal(await redis.echo("hello"), "hello");
  equal((await redis.time()).length, 2);
  await redis.set("k", "v");
  await rejects(redis.lpush("k", 1), /WRONGTYPE Operation against a key holding the wrong kind of value/);
  await rejects(new Redis({ ...connection, token: "wrong" }).ping(), /WRONGPASS invalid or missing auth token/);
});

test("subscriptions get messages, by channel and by pattern, until they end", async () => {
  for (const [subscribe, type] of [[() => redis.subscribe("news:1"), "message"], [() => redis.psubscribe("news:*"), "pmessage"]]) {
    const subscriber = subscribe();
    await new Promise((resolve, reject) => {
      subscriber.on(type === "message" ? "subscribe" : "psubscribe", resolve);
      subscriber.on("error", reject);
    });
    const messages = [];
    const all = new Promise((resolve) => subscriber.on(type, (event) => messages.push(event) === 3 && resolve()));
    // By pattern, this SDK takes JSON only.
    const sent = [type === "message" ? "hello, world" : "7", { json: ["ü", 1] }, [true, null]];
    for (const message of sent) equal(await redis.publish("news:1", message), 1);
    await all;
    deepEqual(messages.map(({ message }) => message), [sent[0] === "7" ? 7 : sent[0], ...sent.slice(1)]);
    ok(messages.every(({ channel }) => channel === "news:1"));
    await subscriber.unsubscribe();
    while ((await redis.publish("news:1", "anyone?")) !== 0);
  }
});

test("a client reads its own writes from a replica that lags", async () => {
  const faults = (method, body) =>
    fetch(`${connection.url}/-/faults`, { method, body, headers: { authorization: `Bearer ${connection.token}` } });
  await redis.set("ryw", "old");
  await faults("POST", JSON.stringify({ action: "replica_lag" }));
  const stranger = new Redis({ ...connection, readYourWrites: false });
  try {
    equal(await stranger.get("ryw"), "old");
    await redis.set("ryw", "new");
    equal(await redis.get("ryw"), "new");
    equal(await stranger.get("ryw"), "old");
  } finally {
    await faults("DELETE");
  }
});
