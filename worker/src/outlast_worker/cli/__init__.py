"""The command `outlast`.

Exit codes: 0 done · 1 the answer is no (the job failed, was cancelled, does not exist, is not dead, its id or key is
taken) · 2 nothing was sent: an argument, the configuration, or the module to run is wrong · 3 the database did not
answer, or refused · 4 the time was up · 130 interrupted.

Results go to stdout and everything else to stderr, so that pipes stay clean. With --json an error is one line of JSON
on stderr.
"""

from . import acl as acl
from . import cost as cost
from . import doctor as doctor
from . import jobs as jobs
from . import queues as queues
from . import serve
from .app import app, main

__all__ = ["app", "main"]

# In `outlast --help` the commands that stay come first. The sort keeps the order of each module.
app.registered_commands.sort(key=lambda info: getattr(info.callback, "__module__", "") != serve.__name__)
