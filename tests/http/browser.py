"""A browser without a window, and what a test does with the page in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from selenium import webdriver
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

from tests.http.web import Web
from tests.support import ROOT
from tests.support.eventually import HANG_S

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
AXE = ROOT / ".cache" / "node-tests" / "node_modules" / "axe-core" / "axe.min.js"
# The first element of a selector, or of an XPath, that is shown with that text, or any where it is null.
FIND = """
const [selector, isPath, text] = arguments;
const found = [];
if (isPath) {
  const all = document.evaluate(selector, document, null, XPathResult.ORDERED_NODE_SNAPSHOT_TYPE, null);
  for (let at = 0; at < all.snapshotLength; at++) found.push(all.snapshotItem(at));
} else found.push(...document.querySelectorAll(selector));
const isShown = (one) => one.checkVisibility({checkVisibilityCSS: true, checkOpacity: true});
return found.find((one) => isShown(one) && (text === null || one.innerText.trim() === text)) ?? null;
"""
T = TypeVar("T")


@contextmanager
def chromium(profile: Path) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-extensions",
        "--disable-gpu",
        # A page that is left, and one that may come, have no process.
        "--disable-features=SpareRendererForSitePerProcess,BackForwardCache",
        "--renderer-process-limit=1",
        "--no-first-run",
        "--host-resolver-rules=MAP * 127.0.0.1",  # a name of another site leads here, too; nothing else is asked
        f"--user-data-dir={profile}",
    ):
        options.add_argument(word)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    driver.set_script_timeout(HANG_S)
    driver.set_page_load_timeout(HANG_S)
    try:
        yield driver
    finally:
        driver.quit()


class Page:
    """The page of a server, in a browser."""

    def __init__(self, driver: webdriver.Chrome, web: Web) -> None:
        self.driver, self.web = driver, web

    def open(self, path: str) -> None:
        """Load the page with the view of a path."""
        self.driver.get("about:blank")
        self.driver.get(f"{self.web.url}/.web/#{path}")

    def until(self, value: Callable[[], T | None]) -> T:
        """The first value that is true; an element may be drawn again meanwhile."""
        wait = WebDriverWait(
            self.driver, HANG_S, 0.05, (NoSuchElementException, StaleElementReferenceException, IndexError)
        )
        return wait.until(lambda _: value())

    def one(self, selector: str) -> WebElement:
        """An element that is shown."""
        return self.shown(By.CSS_SELECTOR, selector)

    def shown(self, by: str, selector: str, text: str | None = None) -> WebElement:
        """The first that is shown, with that text. It is found in one step: a list is drawn again every other second,
        and what a step before had found of it is stale."""
        return self.until(lambda: self.driver.execute_script(FIND, selector, by == By.XPATH, text))

    def text(self, selector: str) -> str:
        return self.until(lambda: self.one(selector).text)

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements that are shown."""
        found = self.driver.execute_script(
            "return [...document.querySelectorAll(arguments[0])].filter((one) => one.checkVisibility())"
            ".map((one) => one.innerText)",
            selector,
        )
        assert isinstance(found, list)
        return found

    def shows(self, selector: str, text: str) -> None:
        """Wait until an element has a text in it."""
        self.until(lambda: any(text in found for found in self.texts(selector)))

    def button(self, name: str) -> WebElement:
        """A button, or what opens a section, of that name."""
        return self.shown(By.CSS_SELECTOR, "button, summary", name)

    def press(self, name: str) -> None:
        self.until(lambda: self.button(name).click() or True)

    def type(self, label: str, text: str) -> None:
        """Into the field of that label."""
        self.field(label).clear()
        self.field(label).send_keys(text)

    def field(self, label: str) -> WebElement:
        path = (
            f"//label[normalize-space(text())={label!r}]//*[self::input or self::select or self::textarea]"
            f"|//*[@aria-label={label!r}][self::input or self::textarea]"
        )
        return self.shown(By.XPATH, path)

    def key(self, text: str) -> None:
        self.one("body").send_keys(text)

    def confirm(self, name: str) -> None:
        """Type the name that a dangerous action asks for."""
        yes = self.one("#confirm-yes")
        assert not yes.is_enabled()
        self.one("#confirm-input").send_keys(name)
        self.one("#confirm-input").send_keys(Keys.ENTER)

    def messages(self) -> list[str]:
        return self.texts(".messages .preview")

    def console(self) -> list[dict[str, Any]]:
        """What the console got since the last look."""
        return [entry for entry in self.driver.get_log("browser") if entry["level"] in ("SEVERE", "WARNING")]

    def width(self, pixels: int) -> None:
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": pixels, "height": 800, "deviceScaleFactor": 1, "mobile": False},
        )

    def scheme(self, name: str) -> None:
        """What the system prefers: light or dark."""
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": name}]}
        )

    def violations(self) -> list[Any]:
        """What axe finds against."""
        self.driver.execute_script(AXE.read_text())
        found = self.driver.execute_async_script(
            "const [done] = arguments; axe.run().then((all) => done(all.violations.map((one) =>"
            " [one.id, one.nodes.map((node) => [node.html, node.failureSummary])])), (error) => done([String(error)]))"
        )
        assert isinstance(found, list)
        return found
