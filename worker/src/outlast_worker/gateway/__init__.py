"""An Upstash-compatible REST front for any Redis or Valkey, for development, tests and functions without TCP.

    config = GatewayConfig(databases=[Database(redis_url="redis://127.0.0.1:6379", token=secret)])
    serve(config)                                    # blocks; or run Gateway(config) under any ASGI server

Towards the caller: `request.py`, `wire.py` (JSON and paths), `server.py` (uvicorn, loopback unless told otherwise). In
the middle: `app.py` puts it together, `commands.py` says what is allowed and how refusals read. Towards the database:
`backend.py`, `upstream.py` (connections), `resp.py` and `scripts.py` (Upstash's script flags). For tests: `faults.py`,
`replica.py` and `meter.py` (billed commands).
"""

from outlast_worker.gateway.app import Gateway
from outlast_worker.gateway.config import Database, GatewayConfig
from outlast_worker.gateway.faults import Faults, Rule
from outlast_worker.gateway.meter import Bill
from outlast_worker.gateway.server import GatewayServer, serve

__all__ = ["Bill", "Database", "Faults", "Gateway", "GatewayConfig", "GatewayServer", "Rule", "serve"]
