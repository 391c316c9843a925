"""Every published closed form that a system declares, against the simulator."""

from __future__ import annotations

import pytest

from octopipe.search.systems import systems
from octopipe.search.systems.closed_forms import ClosedForm, all_closed_forms


@pytest.mark.parametrize(
    "form", [pytest.param(f, id=f"{f.system}-{f.case}-{f.quantity}".replace(" ", "_")) for f in all_closed_forms()]
)
def test_simulation_reproduces_the_closed_form(form: ClosedForm) -> None:
    result = form.checked()
    assert result.matches, f"expected {form.expected}, simulated {result.simulated}"


def test_forms_name_known_systems_in_registry_order() -> None:
    names = [form.system for form in all_closed_forms()]
    order = list(systems())
    assert [order.index(n) for n in names] == sorted(order.index(n) for n in names)


def test_a_difference_is_noticed() -> None:
    form = ClosedForm(system="1f1b", case="", quantity="", expected=3.0, simulate=lambda: 3.001)
    assert not form.checked().matches
    bound = ClosedForm(system="1f1b", case="", quantity="", expected=3.0, simulate=lambda: 2.0, at_most=True)
    assert bound.checked().matches
