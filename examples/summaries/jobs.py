"""The queue: what the web server and the worker agree on."""

from pydantic import BaseModel, Field

from outlast import Queue


class Document(BaseModel):
    # The text travels with the job to keep the example short; store yours, and pass its id.
    text: str = Field(min_length=1, max_length=500_000)


class Summary(BaseModel):
    summary: str
    chunks: int


DAY = 86_400

summaries = Queue(
    "summaries",
    payload=Document,
    result=Summary,
    max_attempts=5,
    timeout=600,
    result_ttl=DAY,  # long enough for browsers and webhooks; what you must keep goes into your database
    dead_ttl=7 * DAY,
)
