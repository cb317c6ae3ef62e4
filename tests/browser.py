"""A headless Chromium, driven over DevTools' pipe: pages at a size and colour scheme, keys, scripts and screenshots."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator
from typing import Any

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# A browser shares the machine with services that compile.
START_S = 60.0
CALL_S = 30.0
# DevTools reads its file 3 and writes its file 4.
_LAUNCH = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
_KEYS = {"Enter": (13, "\r"), "Escape": (27, ""), "Tab": (9, ""), "ArrowRight": (39, ""), "ArrowLeft": (37, "")}


def installed() -> str:
    """Path of a browser; empty if there is none."""
    return next((path for name in BROWSERS if (path := shutil.which(name))), "")


class PageError(AssertionError):
    """A script of a test has failed, or waited for what did not come."""


class Browser:
    """A browser's pipe: calls, and the events of its pages."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._pages: dict[str, Page] = {}

    async def call(self, method: str, session: str = "", **params: Any) -> Any:
        """A command's result."""
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        self._writer.write(json.dumps(message).encode() + b"\0")
        async with asyncio.timeout(CALL_S):
            return await future

    async def read(self) -> None:
        """Pass on what the browser says."""
        while True:
            message = json.loads((await self._reader.readuntil(b"\0"))[:-1])
            if "id" in message:
                future = self._waiting.pop(message["id"])
                if "error" in message:
                    future.set_exception(PageError(message["error"]["message"]))
                elif not future.done():
                    future.set_result(message["result"])
            elif page := self._pages.get(message.get("sessionId", "")):
                page.hear(message["method"], message["params"])

    async def open(self, url: str, width: int = 1400, height: int = 900, scheme: str = "light") -> Page:
        """A new page, which has loaded."""
        target = (await self.call("Target.createTarget", url="about:blank"))["targetId"]
        session = (await self.call("Target.attachToTarget", targetId=target, flatten=True))["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{domain}.enable")
        await page.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )
        await page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await page.call("Page.navigate", url=url)
        await page.until("document.readyState === 'complete'")
        return page


class Page:
    """A page. `problems` are its script errors and what its policy has stopped; `requests` the addresses it called."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser, self._session = browser, session
        self.problems: list[str] = []
        self.requests: list[str] = []

    async def call(self, method: str, **params: Any) -> Any:
        """A command's result."""
        return await self._browser.call(method, self._session, **params)

    def hear(self, method: str, params: Any) -> None:
        """Take an event."""
        if method == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["source"] in ("security", "javascript", "violation"):
            self.problems.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    async def evaluate(self, script: str) -> Any:
        """The value of an expression."""
        told = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in told:
            raise PageError(f"{script}: {told['exceptionDetails']}")
        return told["result"].get("value")

    async def until(self, script: str, timeout_s: float = CALL_S) -> Any:
        """The value of an expression as soon as it is true."""
        deadline_s = asyncio.get_running_loop().time() + timeout_s
        while not (value := await self.evaluate(script)):
            if asyncio.get_running_loop().time() > deadline_s:
                raise PageError(f"not within {timeout_s} s: {script}; {self.problems}")
            await asyncio.sleep(0.05)
        return value

    async def press(self, key: str) -> None:
        """Press and release a key."""
        code, text = _KEYS[key]
        common = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **common)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    async def type(self, text: str) -> None:
        """Put text in where the focus is."""
        await self.call("Input.insertText", text=text)

    async def screenshot(self) -> bytes:
        """The whole page as PNG."""
        shot = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(shot["data"])


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser while the context is open."""
    to_browser, from_browser = os.pipe(), os.pipe()
    loop = asyncio.get_running_loop()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        options += ["--remote-debugging-pipe", f"--user-data-dir={profile}", "--no-first-run", "about:blank"]
        command = [sys.executable, "-c", _LAUNCH, str(to_browser[0]), str(from_browser[1]), installed(), *options]
        fds = (to_browser[0], from_browser[1])
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(*command, pass_fds=fds, stdout=null, stderr=null)
        for fd in fds:
            os.close(fd)
        reader = asyncio.StreamReader(limit=2**26)
        source, _ = await loop.connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(from_browser[0], "rb", 0)
        )
        sink, protocol = await loop.connect_write_pipe(
            asyncio.streams.FlowControlMixin, os.fdopen(to_browser[1], "wb", 0)
        )
        browser = Browser(reader, asyncio.StreamWriter(sink, protocol, None, loop))
        reading = asyncio.create_task(browser.read())
        try:
            async with asyncio.timeout(START_S):
                await browser.call("Browser.getVersion")
            yield browser
        finally:
            reading.cancel()
            await asyncio.wait({reading})
            process.terminate()
            await process.wait()
            source.close()
            sink.close()
