"""Bodies of requests: their size, their time, their sum; and the budget that decoding shares."""

import asyncio

import pytest

pytest.importorskip("starlette")
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException

from vlm.serving import server as module
from vlm.serving.server import Budget, ClientDisconnected, RequestBodyLimiter


def parts(*sizes: int, hangs: bool = False, gone: bool = False):
    """A client that sends a body in parts."""
    waiting = list(sizes)

    async def receive():
        await asyncio.sleep(0)
        if waiting:
            size = waiting.pop(0)
            return {"type": "http.request", "body": bytes(size), "more_body": bool(waiting) or hangs or gone}
        if gone:
            return {"type": "http.disconnect"}
        await asyncio.sleep(60)

    return receive


async def read(bodies: RequestBodyLimiter, receive, **headers: str) -> int:
    async with bodies.read(Headers(headers), receive) as body:
        return len(body)


def status(bodies: RequestBodyLimiter, receive, **headers: str) -> int:
    with pytest.raises(HTTPException) as fault:
        asyncio.run(read(bodies, receive, **headers))
    assert bodies.size == 0
    return fault.value.status_code


def test_a_body_is_refused_by_its_header_or_as_it_grows():
    bodies = RequestBodyLimiter(1000)
    assert asyncio.run(read(bodies, parts(600, 400))) == 1000 and bodies.size == 0
    assert status(bodies, parts(600, 401)) == 413
    assert status(bodies, None, **{"content-length": "1001"}) == 413  # before anything is received


def test_a_body_has_its_time(monkeypatch):
    monkeypatch.setattr(module, "BODY_TIMEOUT", 0.1)
    assert status(RequestBodyLimiter(1000), parts(600, hangs=True)) == 408


def test_a_client_that_leaves_is_not_a_fault():
    bodies = RequestBodyLimiter(1000)
    with pytest.raises(ClientDisconnected):
        asyncio.run(read(bodies, parts(600, gone=True)))
    assert bodies.size == 0


def test_a_body_that_stalls_gives_way_and_one_that_grows_does_not(monkeypatch):
    monkeypatch.setattr(module, "STALL_TIME", 0.1)

    async def run():
        bodies = RequestBodyLimiter(1000)
        half = [asyncio.create_task(read(bodies, parts(900, hangs=True))) for _ in range(4)]
        await asyncio.sleep(0.05)
        with pytest.raises(HTTPException) as fault:  # none has stalled yet
            await read(bodies, parts(500))
        assert fault.value.status_code == 503 and fault.value.headers == {"Retry-After": "1"}
        await asyncio.sleep(0.1)
        assert await read(bodies, parts(500)) == 500
        await asyncio.sleep(0.05)
        assert [task.done() for task in half] == [True, False, False, False]
        assert half[0].exception().status_code == 503 and bodies.size == 2700
        for task in half:
            task.cancel()
        await asyncio.gather(*half, return_exceptions=True)
        assert bodies.size == 0

    asyncio.run(run())


def test_the_memory_of_bodies_that_have_gone_is_returned(monkeypatch):
    returned = []
    monkeypatch.setattr(module, "return_freed_memory", lambda: returned.append(1))
    monkeypatch.setattr(module, "RELEASE_AFTER", 1500)
    bodies = RequestBodyLimiter(1000)
    for _ in range(4):
        asyncio.run(read(bodies, parts(1000)))
    assert len(returned) == 2


def test_the_smallest_part_of_a_budget_is_served_first():
    order, running = [], []

    async def use(budget, amount):
        async with budget.acquire(amount, deadline=asyncio.get_running_loop().time() + 60):
            order.append(amount)
            running.append(amount)
            assert budget.used <= 100 and len(running) <= 3
            await asyncio.sleep(0.01)
            running.remove(amount)

    async def run():
        budget = Budget(100, slots=3)
        await asyncio.gather(*(use(budget, amount) for amount in (90, 90, 200, 1, 50, 2, 3)))
        assert budget.used == 0

    asyncio.run(run())
    assert order == [90, 1, 2, 3, 50, 90, 200]


def test_who_waits_too_long_for_the_budget_gets_503():
    async def run():
        budget = Budget(100, slots=2)
        now = asyncio.get_running_loop().time()
        async with budget.acquire(100, deadline=now + 60):
            with pytest.raises(HTTPException) as fault:
                async with budget.acquire(10, deadline=now + 0.05):
                    pass
            assert fault.value.status_code == 503
        assert budget.used == 0
        async with budget.acquire(100, deadline=now + 60):
            pass

    asyncio.run(run())
