"""A Lambda runtime that streams: AWS's own runtime for Python sends an answer only once it is whole.

`bootstrap.sh`, named by AWS_LAMBDA_EXEC_WRAPPER, starts it in the place of AWS's. It serves the ASGI app that the
function's handler setting names (`app.app`) and needs a function URL with InvokeMode RESPONSE_STREAM. Standard library
only.
"""

import asyncio
import base64
import http.client
import importlib
import json
import os
import time
import traceback
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

HOST = os.environ["AWS_LAMBDA_RUNTIME_API"]
RUNTIME = "/2018-06-01/runtime/"


class Context:
    """What AWS's runtime gives a handler, as far as anybody here asks: how long the invocation may still take."""

    def __init__(self, headers: http.client.HTTPMessage) -> None:
        self.aws_request_id = headers["lambda-runtime-aws-request-id"]
        self._deadline_ms = int(headers["lambda-runtime-deadline-ms"])

    def get_remaining_time_in_millis(self) -> int:
        return max(0, self._deadline_ms - int(time.time() * 1000))


class Answer:
    """The answer to one invocation, sent part by part as the app makes it."""

    def __init__(self, request_id: str) -> None:
        self._where = f"{RUNTIME}invocation/{request_id}"
        self._api = http.client.HTTPConnection(HOST)
        self.begun = False

    async def send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._begin(message["status"], message.get("headers", []))
        elif message.get("body"):
            self._part(message["body"])

    def _begin(self, status: int, headers: Any) -> None:
        self.begun = True
        self._api.putrequest("POST", f"{self._where}/response", skip_accept_encoding=True)
        self._api.putheader("Content-Type", "application/vnd.awslambda.http-integration-response")
        self._api.putheader("Lambda-Runtime-Function-Response-Mode", "streaming")
        self._api.putheader("Transfer-Encoding", "chunked")
        self._api.putheader("Trailer", "Lambda-Runtime-Function-Error-Type, Lambda-Runtime-Function-Error-Body")
        self._api.endheaders()
        pairs = [(name.decode("latin-1").lower(), value.decode("latin-1")) for name, value in headers]
        head = {
            "statusCode": status,
            "headers": {name: value for name, value in pairs if name != "set-cookie"},
            "cookies": [value for name, value in pairs if name == "set-cookie"],
        }
        self._part(json.dumps(head).encode() + bytes(8))

    def _part(self, data: bytes) -> None:
        self._api.send(b"%x\r\n%b\r\n" % (len(data), data))

    def finish(self) -> None:
        with suppress(OSError, http.client.HTTPException):  # the caller may be gone: nobody is left to tell
            self._api.send(b"0\r\n\r\n")
            self._close()

    def fail(self, error: Exception) -> None:
        kind, body = type(error).__name__, json.dumps({"errorType": type(error).__name__, "errorMessage": str(error)})
        with suppress(OSError, http.client.HTTPException):
            if self.begun:  # the status has left: an error can only follow the body
                told = base64.b64encode(body.encode()).decode()
                trailers = f"Lambda-Runtime-Function-Error-Type: {kind}\r\nLambda-Runtime-Function-Error-Body: {told}"
                self._api.send(f"0\r\n{trailers}\r\n\r\n".encode())
            else:
                self._api.request("POST", f"{self._where}/error", body, {"Lambda-Runtime-Function-Error-Type": kind})
            self._close()

    def _close(self) -> None:
        self._api.getresponse().read()
        self._api.close()


def scope_of(event: dict[str, Any], context: Context) -> dict[str, Any]:
    """A function URL's event as ASGI's scope, with the keys that Mangum adds too."""
    request = event["requestContext"]["http"]
    headers = [(name.lower().encode(), value.encode()) for name, value in event.get("headers", {}).items()]
    if event.get("cookies"):
        headers.append((b"cookie", "; ".join(event["cookies"]).encode()))
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": request["method"],
        "scheme": "https",
        "path": unquote(event["rawPath"]),
        "raw_path": event["rawPath"].encode(),
        "root_path": "",
        "query_string": event.get("rawQueryString", "").encode(),
        "headers": headers,
        "client": (request["sourceIp"], 0),
        "server": (event["requestContext"].get("domainName", "lambda"), 443),
        "aws.event": event,
        "aws.context": context,
    }


async def invoke(app: Any, event: dict[str, Any], context: Context) -> None:
    text = event.get("body") or ""
    body = [base64.b64decode(text) if event.get("isBase64Encoded") else text.encode()]
    answer = Answer(context.aws_request_id)

    async def receive() -> dict[str, Any]:
        if not body:
            await asyncio.Event().wait()  # nobody tells a function that its caller has gone
        return {"type": "http.request", "body": body.pop(), "more_body": False}

    try:
        await app(scope_of(event, context), receive, answer.send)
    except Exception as error:
        traceback.print_exc()
        answer.fail(error)
    else:
        answer.finish()


async def main() -> None:
    api = http.client.HTTPConnection(HOST)
    try:
        module, _, name = os.environ["_HANDLER"].rpartition(".")
        app = getattr(importlib.import_module(module.replace("/", ".")), name)
    except Exception as error:
        traceback.print_exc()
        api.request("POST", f"{RUNTIME}init/error", json.dumps({"errorType": type(error).__name__}))
        raise SystemExit(1) from None
    while True:  # one loop for all invocations, so that the client's connections stay usable
        api.request("GET", f"{RUNTIME}invocation/next")
        response = api.getresponse()
        await invoke(app, json.loads(response.read()), Context(response.headers))


if __name__ == "__main__":
    asyncio.run(main())
