"""Run by any version of PyPI's openai against the server at $URL."""

import json
import os
from typing import Any

import openai

TOKENS = ["Every ", "answer ", "out", "lasts ", "its ", "request."]
TEXT = "".join(TOKENS)
client = openai.OpenAI(base_url=f"{os.environ['URL']}/v1", api_key="k", max_retries=0, timeout=20)


def ask(**script: Any) -> dict[str, Any]:
    return {"model": "any", "input": json.dumps({"tokens": TOKENS, **script}), "background": True}


def follow(id: str, cut: int) -> str:
    """Resume by the sequence number after every cut; the text of the last item."""
    last, items = -1, {}
    while True:
        try:
            headers = {"x-cut": str(cut)}
            # Closed by `with`: a stream left to the garbage collector can lock up httpcore.
            with client.responses.retrieve(id, stream=True, starting_after=last, extra_headers=headers) as stream:
                for event in stream:
                    assert event.sequence_number > last
                    last = event.sequence_number
                    if event.type == "response.output_item.added":
                        items[event.item.id] = ""
                    elif event.type == "response.output_text.delta":
                        items[event.item_id] += event.delta
                    elif event.type == "response.completed":
                        assert event.response.output_text == TEXT
                        return list(items.values())[-1]
        except Exception as error:
            if "RemoteProtocolError" not in f"{error!r} {error.__cause__!r}":
                raise


for cut in (1, 4):
    for fails in ([], [0], [3], [2, 4]):
        assert follow(client.responses.create(**ask(fails=fails)).id, cut) == TEXT, (cut, fails)

for fails in ([], [3]):
    with client.responses.stream(**ask(fails=fails, pause=0.01)) as live:
        numbers = [event.sequence_number for event in live]
        final = live.get_final_response()
        assert final.output_text == TEXT
    for number in numbers[:-1]:
        with client.responses.stream(response_id=final.id, starting_after=number) as resumed:
            assert next(iter(resumed)).sequence_number > number
            assert resumed.get_final_response().output_text == TEXT

made = client.responses.create(**ask(pause=1))
assert client.responses.cancel(made.id).status == "cancelled"
assert client.responses.create(**{**ask(), "background": False}).output_text == TEXT

messages: Any = [{"role": "user", "content": ask(fails=[3])["input"]}]
assert client.chat.completions.create(model="any", messages=messages).choices[0].message.content == TEXT
with client.chat.completions.create(model="any", messages=messages, stream=True) as chunks:
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT

try:
    client.responses.retrieve("resp_chat_unknown")
except openai.NotFoundError:
    print("passed with", openai.__version__)
else:
    raise AssertionError("an unknown id was found")
