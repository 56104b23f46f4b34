from tests.protocol.conftest import connection as connection
from tests.protocol.conftest import lab as lab
from tests.worker.conftest import aclient as aclient
from tests.worker.conftest import client as client
from tests.worker.conftest import queue as queue
from tests.worker.conftest import spawn as spawn
