"""Runs one ControllerServer: python run_controller.py JSON. Ends at SIGTERM, 1 when it failed."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import uvloop

from penstock.raft_meta.config import ControllerConfig
from penstock.raft_meta.controller import ControllerServer


async def main(settings: dict) -> int:
    settings["data_dir"] = Path(settings["data_dir"])
    settings["listen"] = tuple(settings["listen"])
    settings["voters"] = {int(n): tuple(a) for n, a in settings["voters"].items()}
    server = ControllerServer(ControllerConfig(**{"may_found": True, **settings}))
    await server.start()
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    failed = server.wait_failed()
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([failed, stopping], return_when=asyncio.FIRST_COMPLETED)
    if failed.done():
        sys.stderr.write(f"failed: {failed.exception()}\n")
        return 1
    await server.stop()
    return 0


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        sys.exit(runner.run(main(json.loads(sys.argv[1]))))
