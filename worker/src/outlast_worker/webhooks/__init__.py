"""Webhooks: tell a URL that a job has ended.

::

    jobs.enqueue(payload, webhook="https://example.com/hooks/outlast")    # in the producer
    Webhooks([os.environ["WEBHOOK_SECRET"]]).serve(worker, generate)      # beside the handlers, or in another worker

The script that ends a job puts its delivery on the queue ``{name}:hooks``, so none is lost and none is made twice. A
delivery whose answer was lost is sent again under the same id: receivers drop what they have seen.
"""

from .delivery import Delivery, Webhooks
from .signing import new_secret

__all__ = ["Delivery", "Webhooks", "new_secret"]
