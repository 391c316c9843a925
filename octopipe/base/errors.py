"""The exceptions that users see.

Knows: the form of an error message (the thing, the place, the remedy) and that the command line turns it into exit
code 2 (3: does not fit in memory). Does not know: what can go wrong; every package writes its own messages.
"""

MAX_MICRO_BATCHES = 1 << 16
"""A plan lists every op of every micro-batch: with more micro-batches, it would fill the memory of most machines."""


class OctoPipeError(Exception):
    """Bad input: one line that names the thing, the place and the remedy; never a traceback for the user."""


class PlanError(OctoPipeError):
    """A plan that cannot run: carries every problem found, one line each, the first one as the message."""

    def __init__(self, problems: list[str]):
        self.problems = tuple(problems)
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        super().__init__(problems[0] + more)


class DeadlockError(OctoPipeError):
    """Orders that wait for each other in a cycle; `cycle` lists the operations of one such cycle."""

    def __init__(self, message: str, cycle: tuple[str, ...]):
        self.cycle = cycle
        super().__init__(message)


class DoesNotFitError(OctoPipeError):
    """No plan fits in memory: the message names the rank, the missing GiB and what would help."""


class NotApplicableError(OctoPipeError):
    """A system's own constraints do not hold here (an even number of ranks, m >= 2p, ...)."""


class StoppedError(OctoPipeError):
    """A search was stopped before it had found anything to return."""


class Terminated(KeyboardInterrupt):
    """SIGTERM, raised as an exception so that it ends a command in the same way as Ctrl-C."""
