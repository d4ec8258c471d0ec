"""Encoded inputs, as an encoder hands them to a decoder."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class Context:
    """Encoded states that a decoder attends to.

    Shapes:
        states (B, S, D), mask bool (B, S), True = may be attended to, or None where all may
    """

    states: Tensor
    mask: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> "Context":
        """The context of some of the inputs."""
        return Context(self.states[rows], None if self.mask is None else self.mask[rows])
