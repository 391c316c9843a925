"""What is kept of a captured op, and of a micro-batch whose ops are graphs.

Knows: which graph, inputs and outputs belong to an op. Does not know: how they are captured or replayed
(`cuda_graphs.py`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from octopipe.runtime.slots import Cell
from octopipe.runtime.stages.graph_driver import CopyNode
from octopipe.runtime.stages.graph_inputs import Inputs
from octopipe.runtime.stages.graph_launch import Graph


class Captured:
    """The graph of one op with its inputs and outputs."""

    __slots__ = ("form", "graph", "input_message", "inputs", "needs", "node", "outputs", "then")

    def __init__(
        self, graph: Graph, inputs: Inputs, form: Any, outputs: list[Any], needs: list[bool] | None, then: Any
    ):
        self.graph, self.inputs, self.form, self.outputs, self.needs = graph, inputs, form, outputs, needs
        """`form`: how the outputs are nested. `outputs`: views of the memory to which the graph writes them."""
        self.then = then
        """The function after the last layer, without its target."""
        self.input_message: Any = None
        """For F: the form of a message whose value fits the graph. Messages of this form are not compared again."""
        self.node: CopyNode | None = None
        """For F: the copy of that value inside the graph. For I and B: that of a gradient that a transport delivers."""

    def learn(self, cell: Cell, value: Any) -> None:
        """Remember the form of the message of a value that fits, so that later ones of this form are not compared.

        Done only for a single tensor without a function after the last layer. A transport delivers such a tensor
        contiguous and on its own device, so the form of the message determines it completely.
        """
        if cell.input_message is not None and isinstance(value, Tensor) and self.then is None and self.form is True:
            self.node = self.inputs.first_node()
            self.input_message = None if self.node is None else cell.input_message

    def learn_gradients(self, cell: Cell) -> None:
        """Remember the copy of a gradient that a transport delivers: its form is that of the output, which is fixed."""
        if cell.gradient_slot is not None and self.inputs.count == 1:
            self.node = self.inputs.first_node()


class Passage:
    """What F stores in a cell for its later ops: the `runs` being captured, or None if the ops are replayed."""

    __slots__ = ("runs",)

    def __init__(self, runs: list[Any] | None):
        self.runs = runs


REPLAYED = Passage(None)
