"""An ingress whose port another one serves: when it listens, and how it stops before that. Its router is away."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import msgspec
import pytest
from ray.serve.exceptions import RayServeException

from oscine.api.server import ServerError, bind
from oscine.extensions.cluster.ray.ingress import Ingress
from oscine.extensions.replicas.spec.deployment import ModelSpec, RoleSpec
from oscine.settings.config import ServerOptions, ToolOptions

MODELS = msgspec.to_builtins([ModelSpec(("m",), (RoleSpec(),))])
HOST = "127.0.0.1"


class AwayRouter:
    """Stands for the handle of a Serve deployment without replicas."""

    @property
    def address(self) -> "AwayRouter":
        return self

    def remote(self) -> None:
        raise RayServeException("no router")


class Stoppable(Ingress):
    async def stop(self) -> None:
        """As Serve does it."""
        await super().__del__()

    def __del__(self) -> None:  # type: ignore[override]
        """Python's own call awaits nothing."""


def ingress(port: int) -> Stoppable:
    router: Any = AwayRouter()
    return Stoppable(ServerOptions(port=port), ToolOptions(), "", router)


def config() -> dict[str, Any]:
    """No model becomes ready within these tests."""
    return {"models": MODELS, "prefix_seed": "", "listen_within_s": 600.0}


@pytest.fixture
def port() -> Iterator[int]:
    """Held, not served: so that another socket may listen there, and no other process takes it."""
    with closing(bind(HOST, 0, reuse_port=True)) as holder:
        yield holder.getsockname()[1]


def accepts(port: int) -> bool:
    with closing(socket.socket()) as client:
        return client.connect_ex((HOST, port)) == 0


def test_an_ingress_alone_on_its_port_waits_for_no_model(port: int) -> None:
    async def run() -> None:
        alone = ingress(port)
        await alone.reconfigure(config())
        assert accepts(port)
        assert await alone.pending() == ["m"]
        await alone.stop()

    asyncio.run(run())
    assert not accepts(port)


def test_an_ingress_that_is_stopped_while_it_waits_never_listens(port: int) -> None:
    async def run() -> None:
        second = ingress(port)
        with closing(bind(HOST, port, reuse_port=True)) as first:
            first.listen()
            starting = asyncio.create_task(second.reconfigure(config()))
            connection, _ = await asyncio.to_thread(first.accept)  # the second one finds that the port is served
            connection.close()
            assert await second.pending() == ["m"]
            assert not starting.done()
        await second.stop()
        with pytest.raises(ServerError, match="stopped before it listened"):
            await starting

    asyncio.run(run())
    assert not accepts(port)


def test_an_ingress_that_cannot_start_says_why(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(models: object) -> None:
        raise ArithmeticError("no such model")

    async def run() -> None:
        one = ingress(port)
        monkeypatch.setattr(one, "_follow", fail)
        with pytest.raises(ServerError, match=r"^no such model$"):
            await one.reconfigure(config())
        with pytest.raises(RuntimeError, match="the server has ended: no such model"):
            await one.check_health()

    asyncio.run(run())
