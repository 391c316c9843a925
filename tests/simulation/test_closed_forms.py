"""Every published closed form that a system declares, against the simulator."""

from __future__ import annotations

import pytest

from octopipe.search.systems import systems
from octopipe.search.systems.closed_forms import ClosedForm, all_closed_forms

LARGE = ("p=32 m=96", "p=32 m=128", "p=32 m=256")
"""Half of the time of all forms, for the same forms as on 8 and 16 ranks."""


def _marked(form: ClosedForm) -> pytest.ParameterSet:
    marks = [pytest.mark.slow] if form.case.startswith(LARGE) and form.system != "1f1b" else []
    return pytest.param(form, id=f"{form.system}-{form.case}-{form.quantity}".replace(" ", "_"), marks=marks)


@pytest.mark.parametrize("form", [_marked(form) for form in all_closed_forms()])
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
