"""A step that broke off: it leaves the ranks at different places, and nothing may follow it unnoticed.

Knows: whether a pipeline's last step was whole, and what to say where it was not. Does not know: how to recover.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from octopipe.errors import OctoPipeError


class Failures:
    """Of one pipeline."""

    def __init__(self) -> None:
        self._broken = ""

    def check(self) -> None:
        """Raise unless every step so far was whole."""
        if self._broken:
            raise OctoPipeError(
                f"{self._broken}, and its ranks stand at different places since: call recover() on all ranks and then "
                "zero_grad(), or build a new Pipeline"
            )

    @contextmanager
    def watched(self, step: int, begun: Callable[[], int], *give_up: Callable[[], None]) -> Iterator[None]:
        """A step; where it raises, what it leaves behind is given up.

        `begun` counts what was begun: a mistake that is found before anything is sent leaves everything as it was.
        """
        before = begun()
        try:
            yield
        except BaseException as error:
            if begun() == before:
                raise
            why = " ".join(str(error).split())[:160] or type(error).__name__
            self._broken = f"step {step} broke off ({why})"
            for one in give_up:
                one()
            raise

    def forget(self) -> None:
        """The pipeline is usable again."""
        self._broken = ""
