"""The protocols that existing clients speak, as projections of the same events. Each module can be mounted alone.

::

    edge = Edge(client, queues=[chat], authorize=who)
    app = Starlette(routes=[*edge.routes, *AiSdk(edge).routes, *OpenAIResponses(edge).routes])

Clients, authorize hook, limits and failure texts are the edge's; its own routes need not be served.
"""
