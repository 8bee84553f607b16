"""A headless Chromium, driven by its DevTools protocol over two pipes: no web socket is needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import time

EXECUTABLE = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
_OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio "
    "--disable-extensions --disable-background-networking --disable-component-update "
    "--disable-default-apps --disable-sync --hide-scrollbars --remote-debugging-pipe"
)
# it reads commands from descriptor 3 and writes to 4
_AS_3_AND_4 = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 10) for end in sys.argv[1:3]]
os.dup2(ends[0], 3), os.dup2(ends[1], 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Chromium:
    """One page in a browser of its own. `errors`: what its console was told as an error."""

    def __init__(self, folder, *, width=1280, height=900):
        ours, theirs = os.pipe(), os.pipe()
        command = [EXECUTABLE, *_OPTIONS.split(), f"--user-data-dir={folder}"]
        command.append(f"--window-size={width},{height}")
        self._process = subprocess.Popen(
            [sys.executable, "-SEc", _AS_3_AND_4, str(ours[0]), str(theirs[1]), *command],
            pass_fds=(ours[0], theirs[1]),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._out, self._in = ours[1], theirs[0]
        self._buffer, self._number, self._session = b"", 0, None
        self.errors = []
        try:
            self._attach(width, height)
        except BaseException:
            self.close()
            raise

    def _attach(self, width, height):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def call(self, method, timeout=20.0, **params):
        """What the browser answers."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(timeout)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self, timeout):
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], timeout)[0]:
                raise TimeoutError("Chromium does not answer")
            part = os.read(self._in, 1 << 16)
            if not part:
                raise RuntimeError("Chromium has gone")
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        told = json.loads(message)
        if told.get("method") == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(told["params"]))
        if told.get("method") == "Log.entryAdded":
            entry = told["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url')}")
        return told

    def evaluate(self, expression):
        """The value of an expression of JavaScript."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def wait_for(self, expression, timeout=20.0):
        """The value of the expression, once it is true."""
        deadline = time.monotonic() + timeout
        while True:
            value = self.evaluate(expression)
            if value:
                return value
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {expression}; errors: {self.errors}")
            time.sleep(0.02)

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.wait_for(f"location.href.startsWith({url!r}) && document.readyState === 'complete'")

    def resize(self, width, height, mobile=False):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=mobile,
        )  # fmt: skip

    def prefer(self, scheme):
        """`dark` or `light`."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])

    def press(self, key, text=None):
        more = {} if text is None else {"text": text}
        self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    def point_at(self, x, y):
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self):
        """PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def close(self):
        for end in (self._out, self._in):
            os.close(end)
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()
