"""Headless Chromium, driven over a pipe by its DevTools protocol."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = Path("/usr/bin/chromium")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
_START = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""The browser reads commands from descriptor 3 and answers on 4."""


class View:
    """A page in the browser."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands, self._answers = commands, answers
        self._count = 0
        self._session: dict[str, str] = {}
        self.events: list[dict[str, Any]] = []
        """What the browser told of itself, in order."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        for domain in ("Page", "Network", "Runtime", "Log", "Accessibility"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """What a command answers."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": parameters, **self._session}
        self._commands.write(json.dumps(command).encode() + b"\0")
        self._commands.flush()
        while (message := self._read()).get("id") != self._count:
            self.events.append(message)
        assert "error" not in message, message
        result: dict[str, Any] = message["result"]
        return result

    def _read(self) -> dict[str, Any]:
        data = bytearray()
        while (byte := self._answers.read(1)) != b"\0":
            assert byte, "the browser has ended"
            data += byte
        message: dict[str, Any] = json.loads(data)
        return message

    def open(self, url: str, authorization: str) -> None:
        """Show a page, once it has loaded."""
        self.call("Network.setExtraHTTPHeaders", headers={"Authorization": authorization})
        self.call("Page.navigate", url=url)
        while not any(event["method"] == "Page.loadEventFired" for event in self.events):
            self.events.append(self._read())

    def evaluate(self, expression: str) -> Any:
        """The value of JavaScript, also of a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait_for(self, condition: str) -> None:
        """Return when a condition in JavaScript has become true by a change of the page."""
        self.evaluate(
            "new Promise(done => { const look = () => { if (" + condition + ") done(); };"
            "new MutationObserver(look).observe(document, "
            "{subtree: true, childList: true, characterData: true}); look(); })"
        )

    def roles(self) -> list[tuple[str, str]]:
        """The accessibility tree: role and name of whatever a screen reader tells of."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node.get("ignored") and "role" in node
        ]


@contextmanager
def browser(folder: Path) -> Iterator[View]:
    """A view of a browser whose files are in a folder."""
    theirs_in, commands = os.pipe()
    answers, theirs_out = os.pipe()
    # Away from the numbers that they get in the browser's process.
    given = [fcntl.fcntl(each, fcntl.F_DUPFD_CLOEXEC, 10) for each in (theirs_in, theirs_out)]
    os.close(theirs_in)
    os.close(theirs_out)
    words = [sys.executable, "-c", _START, *map(str, given), str(CHROMIUM), *_OPTIONS]
    process = subprocess.Popen(
        [*words, f"--user-data-dir={folder}"], pass_fds=given, stderr=subprocess.DEVNULL
    )
    for each in given:
        os.close(each)
    try:
        with os.fdopen(commands, "wb") as writing, os.fdopen(answers, "rb") as reading:
            yield View(writing, reading)
    finally:
        process.terminate()
        process.wait()
