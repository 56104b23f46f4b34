// The public conformance suite of Durable Streams, against the server at $URL.
import { runConformanceTests } from "@durable-streams/server-conformance-tests";

runConformanceTests({ baseUrl: process.env.URL!, longPollTimeoutMs: 3000 });
