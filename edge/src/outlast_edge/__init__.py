"""HTTP routes for browsers and SDKs over the queues of outlast: enqueue, get, cancel, and watch across reconnects."""

from ._edge import ANY, Action, Authorize, Edge
from ._frames import sse_frames

__all__ = ["ANY", "Action", "Authorize", "Edge", "sse_frames"]
