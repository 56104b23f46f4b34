from tests.worker.conftest import aclient as aclient
from tests.worker.conftest import client as client
from tests.worker.conftest import queue as queue
