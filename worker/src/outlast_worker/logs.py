"""Log lines that name their job: what `outlast worker --log-format json` writes."""

from __future__ import annotations

import json
import logging
from contextvars import ContextVar
from datetime import UTC, datetime

__all__ = ["JsonFormatter", "current"]

current: ContextVar[tuple[str, str, int] | None] = ContextVar("outlast_job", default=None)
"""Queue, id and attempt of the job whose handler runs here, also in its steps' threads and in tasks that it makes."""


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message; queue, job and attempt inside a job; error if any.

    The handler's own log lines get them too. It writes no payload and no result, unless a message of yours quotes one.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (job := current.get()) is not None:
            line["queue"], line["job"], line["attempt"] = job
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
