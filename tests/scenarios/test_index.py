"""Every scenario has a test that carries its number."""

from tests.scenarios.__main__ import TITLES, by_number


def test_no_scenario_is_without_a_test_and_no_test_names_a_scenario_that_is_not_there() -> None:
    assert by_number().keys() == TITLES.keys()
