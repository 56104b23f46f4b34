"""The local stack of `outlast dev`: an embedded database, the gateway, a worker, and the edge app with its page."""
