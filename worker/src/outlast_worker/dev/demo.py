"""The demo's web front: the page and its routes over HTTP alone, as a serverless function would serve them."""

from __future__ import annotations

import os

from starlette.applications import Starlette
from starlette.middleware.trustedhost import TrustedHostMiddleware

from outlast import AsyncClient
from outlast_edge import ANY, Edge
from outlast_edge.demo import demo_app

from .model import generate, provider

__all__ = ["app"]


def make() -> Starlette:
    edge = Edge(AsyncClient(), queues=[generate], authorize=lambda request, action, job: ANY)
    made = demo_app(edge, model=provider.name, note=provider.note)
    # Any web page can make its own name resolve to loopback; the Host header tells its requests from ours.
    hosts = os.environ.get("OUTLAST_DEV_HOSTS", "127.0.0.1,localhost").split(",")
    made.add_middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False)
    return made


app = make()
