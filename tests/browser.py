"""Headless Chromium through chromedriver, by the few commands of the WebDriver protocol that the tests need."""

import base64
import json
import shutil
import socket
import subprocess
import time
from contextlib import suppress
from urllib.request import Request, urlopen

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's key of an element's id
KEYS = {"Tab": "\ue004", "ArrowLeft": "\ue012", "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015"}
SWITCHES = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--disable-default-apps"),
)
PATIENCE = 60  # seconds


class Browser:
    """A page in a browser of its own; a context manager.

    folder: for the browser's profile. dark: prefers-color-scheme. width: of the page in CSS pixels.
    """

    def __init__(self, folder, dark=False):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._address = f"http://127.0.0.1:{port}"
        self._driver = subprocess.Popen(
            [DRIVER, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        switches = [*SWITCHES, f"--user-data-dir={folder}", *(["--force-dark-mode"] if dark else [])]
        options = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": switches},
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }
        try:
            self._wait_for(lambda: self._call("GET", "/status")["ready"])
            opened = self._call("POST", "/session", {"capabilities": {"alwaysMatch": options}})
        except BaseException:
            self._driver.kill()
            raise
        self._address += f"/session/{opened['sessionId']}"
        self._call("POST", "/timeouts", {"script": 1000 * PATIENCE})

    def __enter__(self):
        return self

    def __exit__(self, *error):
        with suppress(OSError):
            self._call("DELETE", "")
        self._driver.terminate()
        self._driver.wait(20)

    def open(self, address):
        self._call("POST", "/url", {"url": address})

    def resize(self, width, height):
        """The size of the page itself, also below the smallest size of a window."""
        self.devtools(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )

    def devtools(self, command, **parameters):
        return self._call("POST", "/goog/cdp/execute", {"cmd": command, "params": parameters})

    def script(self, body, *arguments):
        """What the body of an asynchronous function returns."""
        wrapped = f"const done = arguments[arguments.length - 1]; (async (...given) => {{{body}}})(...arguments)"
        wrapped += ".then(value => done({value}), error => done({error: String(error)}));"
        result = self._call("POST", "/execute/async", {"script": wrapped, "args": list(arguments)})
        assert "error" not in result, result["error"]
        return result.get("value")

    def wait(self, condition):
        """Until an expression in the page is true."""
        self._wait_for(lambda: self.script(f"return Boolean({condition})"))

    def text(self, selector):
        return self.script("return document.querySelector(given[0]).textContent", selector)

    def press(self, *keys):
        presses = [{"type": kind, "value": KEYS[key]} for key in keys for kind in ("keyDown", "keyUp")]
        self._call("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": presses}]})

    def point(self, selector, x, y, click=False):
        """Moves the pointer to this share of an element's width and height."""
        left, top = self.script(
            "const e = document.querySelector(given[0]); e.scrollIntoView({block: 'center'});"
            "const b = e.getBoundingClientRect(); return [b.left + given[1] * b.width, b.top + given[2] * b.height]",
            *(selector, x, y),
        )
        actions = [{"type": "pointerMove", "duration": 0, "x": round(left), "y": round(top)}]
        if click:
            actions += [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        self._call("POST", "/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": actions}]})

    def choose_file(self, selector, path):
        found = self._call("POST", "/element", {"using": "css selector", "value": selector})
        self._call("POST", f"/element/{found[ELEMENT]}/value", {"text": str(path)})

    def screenshot(self, path, whole=False):
        shot = self.devtools("Page.captureScreenshot", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(shot["data"]))

    def requests(self):
        """The addresses on any network that the browser has asked for since the last call."""
        messages = [json.loads(entry["message"])["message"] for entry in self._log("performance")]
        asked = [m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [address for address in asked if address.startswith(("http:", "https:", "ws:", "wss:"))]

    def complaints(self):
        """The errors and warnings in the console since the last call."""
        return [entry["message"] for entry in self._log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def _log(self, kind):
        return self._call("POST", "/se/log", {"type": kind})

    def _call(self, method, path, content=None):
        body = None if content is None else json.dumps(content).encode()
        request = Request(f"{self._address}{path}", body, {"Content-Type": "application/json"}, method=method)
        with urlopen(request, timeout=2 * PATIENCE) as response:
            return json.load(response)["value"]

    def _wait_for(self, condition):
        end = time.monotonic() + PATIENCE
        while True:
            with suppress(OSError):
                if condition():
                    return
            assert time.monotonic() < end, "the page or browser does not get ready"
            time.sleep(0.1)
