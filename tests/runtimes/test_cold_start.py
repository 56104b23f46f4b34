"""A cold function's first enqueue: how many requests it makes. What it costs: tests/packaging/test_cold_start.py."""

from __future__ import annotations

from benchmarks.cold_start import OURS, cost

from .conftest import BASE_PYTHON, Packages, Upstream, dependencies, python_path


def test_a_cold_enqueue_is_one_request_and_two_when_the_database_has_lost_its_scripts(
    upstream: Upstream, packages: Packages
) -> None:
    # An interpreter that sees the client, what it depends on, and nothing else of this machine.
    python = [BASE_PYTHON, "-S"]
    path = python_path(packages.install("client", dependencies("client")))
    environment = {**upstream.environment, "PYTHONPATH": path}
    cost(OURS.program, python, environment)  # the database knows the script from here on
    requests = upstream.faults.delay(0, times=None)
    cost(OURS.program, python, environment)
    assert requests.fired == 1
    upstream.faults.noscript()
    cost(OURS.program, python, environment)
    assert requests.fired == 1 + 2
