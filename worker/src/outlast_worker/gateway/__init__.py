"""An Upstash-compatible REST front for any Redis or Valkey, for development, tests and functions without TCP.

    config = GatewayConfig(databases=[Database(redis_url="redis://127.0.0.1:6379", token=secret)])
    serve(config)                                    # blocks; or run Gateway(config) under any ASGI server

`wire.py` is the HTTP side, `commands.py` what is allowed and how refusals read, `upstream.py` and `resp.py` the
database side, `scripts.py` Upstash's script flags, `meter.py` the billed commands, `faults.py` the test switches,
`app.py` puts them together and `server.py` runs it.
"""

from outlast_worker.gateway.app import Gateway
from outlast_worker.gateway.config import Database, GatewayConfig
from outlast_worker.gateway.faults import Faults, Rule
from outlast_worker.gateway.meter import Bill
from outlast_worker.gateway.server import GatewayServer, serve

__all__ = ["Bill", "Database", "Faults", "Gateway", "GatewayConfig", "GatewayServer", "Rule", "serve"]
