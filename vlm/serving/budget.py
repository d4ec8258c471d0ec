"""A shared budget, such as the pixels decoded at the same time."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from heapq import heappop, heappush
from itertools import count

from starlette.exceptions import HTTPException


class Budget:
    """An amount of which each user takes a part for a while. The smallest part is served first.

    Args:
        most: The total amount.
        places: Number of parts in use at the same time.
    """

    def __init__(self, most: int, *, places: int) -> None:
        self.most, self.places, self.used = most, places, 0
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._turns = count()

    @asynccontextmanager
    async def take(self, amount: int, *, deadline: float) -> AsyncIterator[None]:
        """Holds a part of the amount.

        Args:
            deadline: When a request stops waiting, by the loop's clock.
        Raises:
            HTTPException: The deadline has passed.
        """
        amount = min(amount, self.most)
        turn = asyncio.get_running_loop().create_future()
        heappush(self._waiting, (amount, next(self._turns), turn))
        self._grant()
        try:
            async with asyncio.timeout_at(deadline):
                await turn
            yield
        except TimeoutError as fault:
            raise HTTPException(503, "too many inputs wait to be read; try again", {"Retry-After": "1"}) from fault
        finally:
            if not turn.cancelled():
                self.used, self.places = self.used - amount, self.places + 1
                self._grant()

    def _grant(self) -> None:
        while self._waiting:
            amount, _, turn = self._waiting[0]
            if not turn.done():
                if self.used + amount > self.most or not self.places:
                    return
                self.used, self.places = self.used + amount, self.places - 1
                turn.set_result(None)
            heappop(self._waiting)
