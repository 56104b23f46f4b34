"""The dashboard: what the queues of an edge hold, who works on them, and what one job does.

::

    edge = Edge(client, queues=[chat, images], authorize=authorize)
    app = Starlette(routes=[*edge.routes, Mount("/admin", app=Dashboard(edge).app())])

Plain HTML, CSS and JavaScript, nothing from elsewhere and nothing to build.
"""

from ._dashboard import Dashboard
from ._gate import TokenGate

__all__ = ["Dashboard", "TokenGate"]
