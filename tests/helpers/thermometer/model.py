"""A model with two heads."""

from torch import Tensor, nn


class Regressor(nn.Module):
    """Numbers to a temperature and the logit of an alarm.

    Shapes:
        (B, 4) -> (B,), (B,)
    """

    def __init__(self, *, width: int) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, width)
        self.temperature = nn.Linear(width, 1)
        self.alarm = nn.Linear(width, 1)

    def forward(self, numbers: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.trunk(numbers)
        return self.temperature(hidden)[:, 0], self.alarm(hidden)[:, 0]
