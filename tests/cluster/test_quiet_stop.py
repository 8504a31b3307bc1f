"""What gRPC writes to the log when a master's event loop ends while calls are under way."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest

from plancompiler.master import server as server_module

CALLS = 6


async def serve_and_end() -> None:
    """End at once, with calls that write."""
    begun = asyncio.Semaphore(0)

    async def answer(_: bytes, context: Any) -> None:
        begun.release()
        while True:
            await context.write(b"x")
            await asyncio.sleep(0.0005)

    server = grpc.aio.server()
    handlers = {"Answer": grpc.unary_stream_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Test", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        calls = [channel.unary_stream("/Test/Answer")(b"") for _ in range(CALLS)]
        for _ in calls:
            await begun.acquire()
        await server.stop(0)


def test_cancelled_calls_leave_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    assert server_module.MasterServer  # importing it is what quiets gRPC
    for _ in range(3):
        asyncio.run(serve_and_end())
    gc.collect()
    assert [each.getMessage() for each in caplog.records if each.exc_info] == []
