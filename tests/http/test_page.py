"""The page for browsers, end to end in Chromium."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from urllib.parse import quote

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select

from mqfs.http.groups import KINDS, MODULES
from tests.http.browser import AXE, Page, chromium
from tests.http.web import USER, Web
from tests.support import ROOT
from tests.support.eventually import HANG_S, eventually
from tests.support.ports import free_port
from tests.support.server import mqfs, short_folder

pytestmark = [pytest.mark.process, pytest.mark.slow]
FILES = ("", *(name for name in KINDS if name != "index.html"))
SCRIPT = "<img src=x onerror=\"document.title='run'\"><script>document.title='run'</script>"


class Foreign(BaseHTTPRequestHandler):
    """Another site: all its pages are the example."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write((ROOT / "examples" / "tail.html").read_bytes())

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def foreign() -> Iterator[int]:
    server = HTTPServer(("127.0.0.1", 0), Foreign)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, foreign: int) -> Iterator[Page]:
    with short_folder() as folder:
        tokens = folder / "tokens"
        tokens.touch(0o600)
        web = Web(folder, "--token-file", str(tokens), "--http-origin", f"http://127.0.0.1:{foreign}", at=free_port())
        with web.server, chromium(tmp_path_factory.mktemp("profile")) as driver:
            page = Page(driver, web)
            page.open("/")
            yield page


@pytest.fixture
def web(page: Page) -> Web:
    return page.web


def buried(web: Web, count: int) -> str:
    """A group with a stream `mail`, a consumer `mailer`, and dead letters."""
    group = web.group("retries 1", "backoff 10ms 10ms")
    mailer = f"{group}/.consumers/mailer"
    web.put(f"{group}/mail")
    assert web.put(f"{mailer}?over=mail").status == 201
    for number in range(count):
        web.post(f"{group}/mail", f"letter {number}")
    bury(web, group, count)
    return group


def bury(web: Web, group: str, count: int) -> None:
    """Make dead letters of what waits for `mailer`."""
    mailer = f"{group}/.consumers/mailer"
    for _ in range(count):
        (claim,) = web.post(f"{mailer}/claim").lines
        assert web.post(f"{mailer}/dead?reason=no+such+address", claim["token"]).status == 204


# ---------------------------------------------------------------- what is served


def test_files_are_small_and_kept_by_the_browser(web: Web) -> None:
    size = 0
    for name in FILES:
        answer = web.get(f"/.web/{name}")
        assert answer.status == 200
        size += len(answer.body)
        policy = answer.headers["Content-Security-Policy"]
        assert policy.startswith("default-src 'self';")
        assert "frame-ancestors 'none'" in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Referrer-Policy"] == "no-referrer"
        again = web.get(f"/.web/{name}", If_None_Match=answer.headers["ETag"])
        assert (again.status, again.body) == (304, b"")
    assert size < 69_632
    assert web.get("/.web/other").status == 404
    assert web.get("/.web").headers["Location"] == "/.web/"
    assert web.post("/.web/", "x").status == 405


def test_a_browser_is_led_to_the_page(web: Web, page: Page) -> None:
    group = web.group()
    asked = web.get(f"{group}/", Accept="text/html,application/xhtml+xml,*/*;q=0.8")
    assert (asked.status, asked.headers["Location"]) == (303, f"/.web/#{group}/")
    assert web.get(f"{group}/").json["entries"] == []
    page.driver.get(f"{web.url}{group}/")
    page.shows("h1", group[1:])


def test_a_listing_has_the_counters_of_stats(web: Web) -> None:
    group = web.group("bind v #")
    web.put(f"{group}/inner/")
    web.post(f"{group}/s", "hello")
    listed = {entry["name"]: entry for entry in web.get(f"{group}/?detail").json["entries"]}
    stats = web.get(f"{group}/.stats").json
    assert listed["s"] == {"name": "s", "type": "stream", **stats["streams"]["s"]}
    assert listed["v"] == {"name": "v", "type": "view", "readers": 0}
    inner = web.get(f"{group}/inner/.stats").json
    assert listed["inner"]["log_bytes"] == inner["log_bytes"]
    assert [entry["name"] for entry in web.get(f"{group}/?type=stream").json["entries"]] == ["s"]
    assert web.get(f"{group}/?type=file").status == 400
    del stats["streams"]
    assert web.get(f"{group}/.stats?streams=no").json == stats


def test_dead_letters_are_counted_among_any_number_of_streams(web: Web, page: Page) -> None:
    """Also where the list of streams begins after theirs, or ends before."""
    group = buried(web, 2)
    assert web.get(f"{group}/.stats?streams=no").json["dead_letters"] == 2
    for number in range(1_001):
        assert web.put(f"{group}/a{number:04}").status == 201
    page.open(f"{group}/")
    page.until(lambda: page.texts("main .figures dd"))
    labels, values = page.texts("main .figures dt"), page.texts("main .figures dd")
    assert dict(zip(labels, values, strict=True))["dead letters"] == "2"


# ---------------------------------------------------------------- end to end


def test_make_publish_and_follow(web: Web, page: Page) -> None:
    group = web.group()
    page.open(f"{group}/")
    page.type("named", "orders")
    page.press("Make")
    page.shows("#notice", "stream orders made")
    page.until(lambda: page.driver.find_element(By.LINK_TEXT, "orders").click() or True)
    page.shows("h1", "orders")
    page.shows("main [role=status]", "no messages")
    page.key("t")
    page.shows("main [role=status]", "live")
    page.key("p")
    page.field("Body").send_keys("3 lamps")
    page.type("priority", "7")
    page.field("Headers, one a line").send_keys("tenant: acme & sons")
    page.one("form button:not([type])").click()
    page.shows("#notice", "published as 1")
    page.until(lambda: page.messages() == ["3 lamps"])
    web.post(f"{group}/orders", "from elsewhere")
    page.until(lambda: page.messages() == ["from elsewhere", "3 lamps"])
    [message] = web.get(f"{group}/orders?format=json&count=1").lines
    assert (message["headers"]["tenant"], message["headers"]["priority"]) == ("acme & sons", "7")
    page.until(lambda: page.driver.find_elements(By.CSS_SELECTOR, ".messages summary")[1].click() or True)
    page.shows(".messages dl", "acme & sons")


def test_the_first_that_is_made_is_a_group(page: Page) -> None:
    """Where the page begins: in the root group, which has no stream without a message."""
    page.open("/")
    page.type("named", "first")
    page.press("Make")
    page.shows("#notice", "group first made")
    page.until(lambda: page.driver.find_element(By.LINK_TEXT, "first").click() or True)
    page.shows("h1", "first")


def test_what_is_published_is_shown_at_once(web: Web, page: Page) -> None:
    group = web.group("replay all")
    web.put(f"{group}/orders")
    page.open(f"{group}/orders")
    page.shows("main [role=status]", "no messages")
    page.key("p")
    page.field("Body").send_keys("3 lamps")
    page.one("form button:not([type])").click()
    page.until(lambda: page.messages() == ["3 lamps"])


def test_a_name_is_refused_as_it_was_typed(web: Web, page: Page) -> None:
    """No success of an earlier press is shown beside it."""
    page.open(f"{web.group()}/")
    page.type("named", "a")
    page.press("Make")
    page.shows("#notice", "stream a made")
    page.type("named", "a/b")
    page.press("Make")
    page.shows("main [role=alert]", "invalid name 'a/b'")
    assert not page.texts("#notice")


def test_first_steps_work_as_they_are_written(web: Web, page: Page) -> None:
    group = web.group("replay all")
    page.open(f"{group}/")
    publish, read, follow = page.until(lambda: page.texts("main ol pre"))
    assert "text/event-stream" in follow
    for line in (publish, read):
        typed = subprocess.run(["sh", "-c", line], capture_output=True, timeout=2 * HANG_S, check=True)
    assert typed.stdout == b"hello"
    page.until(lambda: not page.texts("main ol pre"))
    page.shows("main table", "orders")


def test_publish_to_a_stream_that_is_named_in_its_group(web: Web, page: Page) -> None:
    group = web.group("replay all")
    page.open(f"{group}/")
    page.press("Publish")
    page.type("To stream", "mail")
    page.field("Body").send_keys("3 lamps")
    page.until(lambda: page.driver.find_elements(By.CSS_SELECTOR, "details form button:not([type])")[0].click() or True)
    page.shows("#notice", "published as 1")
    assert web.get(f"{group}/mail?since=first").body == b"3 lamps"


def test_the_help_explains_the_words_of_numbers(web: Web, page: Page) -> None:
    page.open(f"{buried(web, 1)}/")
    page.shows("main .figures dt", "dead letters")
    told = "return [...document.querySelectorAll('main [title]')].map((one) => [one.innerText, one.title])"
    titles = dict(page.driver.execute_script(told))
    assert {"kept", "waiting", "claimed", "dead letters"} <= titles.keys()
    page.press("Help")
    words = dict(zip(page.texts("#words dt"), page.texts("#words dd"), strict=True))
    assert titles.items() <= words.items()
    page.press("Close")


def test_bodies_are_never_markup(web: Web, page: Page) -> None:
    group = web.group()
    web.post(f"{group}/s", SCRIPT, Mqfs_H_Evil=SCRIPT)
    web.post(f"{group}/s", bytes(range(250, 256)))
    page.open(f"{group}/s")
    page.until(lambda: page.messages() == ["fa fb fc fd fe ff", SCRIPT])
    for summary in page.driver.find_elements(By.CSS_SELECTOR, ".messages summary"):
        summary.click()
    page.until(lambda: len(page.texts(".messages pre")) == 2)
    assert page.texts(".messages pre") == ["00000000  fa fb fc fd fe ff                                ......", SCRIPT]
    assert SCRIPT in page.texts(".messages dd")
    assert page.driver.find_elements(By.CSS_SELECTOR, ".messages img, .messages script") == []
    assert page.driver.title == f"{group[1:]}/s – mqfs"


def test_a_view_that_was_opened_without_a_server_is_shown_once_it_is_back(web: Web, page: Page) -> None:
    group = web.group("replay all")
    web.post(f"{group}/s", "x")
    page.open(f"{group}/")
    page.shows("main td", "s")
    web.server.kill()
    page.driver.execute_script("location.hash = arguments[0]", f"{group}/s")
    page.shows(".error", "the server does not answer")
    web.server.start()
    page.until(lambda: page.messages() == ["x"])
    page.console()


def test_what_is_not_there(web: Web, page: Page) -> None:
    group = web.group()
    page.console()
    page.open(f"{group}/.dead")
    page.shows("main .quiet", "no dead letters")
    assert page.console() == []
    page.open(f"{group}/none")
    page.shows(".error", "no such stream or group")
    page.console()


def test_a_tail_continues_after_a_restart(web: Web, page: Page) -> None:
    group = web.group()
    web.post(f"{group}/s", "one")
    page.open(f"{group}/s")
    page.until(lambda: page.messages() == ["one"])
    page.press("Live tail")
    page.shows("main [role=status]", "live")
    web.post(f"{group}/s", "two")
    page.until(lambda: page.messages() == ["two", "one"])
    web.server.restart()
    web.post(f"{group}/s", "three")
    page.until(lambda: page.messages() == ["three", "two", "one"])
    page.console()


def test_jumps(web: Web, page: Page) -> None:
    group = web.group()
    for number in range(120):
        web.post(f"{group}/s", f"m{number + 1}")
    page.open(f"{group}/s")
    page.until(lambda: page.messages() == [f"m{number}" for number in range(120, 70, -1)])
    page.press("50 older")
    page.until(lambda: page.messages() == [f"m{number}" for number in range(120, 20, -1)])
    page.type("From", "10")
    page.press("Jump")
    page.until(lambda: page.messages()[-1] == "m10")
    page.press("50 newer")
    page.until(lambda: page.messages() == [f"m{number}" for number in range(109, 9, -1)])
    page.driver.execute_script("document.querySelector('input[type=datetime-local]').value = '2001-02-03T04:05:06'")
    page.press("Jump to time")
    page.until(lambda: page.messages() == [f"m{number}" for number in range(50, 0, -1)])
    page.type("From", "nowhere")
    page.press("Jump")
    page.shows(".error", "since 'nowhere'")


def test_a_consumers_lag_and_seek(web: Web, page: Page) -> None:
    group = web.group()
    for body in ("one", "two", "three"):
        web.post(f"{group}/s", body)
    mail = f"{group}/.consumers/mail"
    assert web.put(f"{mail}?over=s").status == 201
    page.open(mail)
    page.until(lambda: page.messages() == ["one", "two", "three"])
    assert web.post(f"{mail}/claim").status == 200

    def figure(name: str) -> str:
        rows = page.texts("main .figures div")
        return next((row.split("\n")[1] for row in rows if row.startswith(f"{name}\n")), "")

    page.until(lambda: (figure("waiting"), figure("claimed"), figure("handles")) == ("2", "1", "1"))
    page.type("Seek to", "3")
    page.press("Seek")
    page.confirm("mail")
    page.shows("#notice", "mail continues at 3")
    page.until(lambda: page.messages() == ["three"])
    assert web.get(f"{group}/.stats").json["consumers"]["mail"]["waiting"] == 1


def test_dead_letters_are_retried_and_dropped(web: Web, page: Page) -> None:
    group = buried(web, 5)
    page.open(f"{group}/.dead")
    page.until(lambda: len(page.messages()) == 5)
    page.shows(".source", "no such address · from mail")
    Select(page.field("Of")).select_by_visible_text("mail")
    page.press("Retry the oldest")
    page.until(lambda: page.messages() == [f"letter {number}" for number in range(1, 5)])
    page.type("Count", "2")
    page.press("Retry")
    page.until(lambda: page.messages() == ["letter 3", "letter 4"])
    page.one(".messages summary").click()
    page.one(".messages .danger").click()
    page.confirm("dead")
    page.until(lambda: page.messages() == ["letter 4"])
    page.press("Drop all")
    page.confirm("dead")
    page.until(lambda: page.messages() == [])
    bodies = [message["body"] for message in web.get(f"{group}/.consumers/mailer").lines]
    assert bodies == ["letter 0", "letter 1", "letter 2"]


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"], ids=repr)
def test_a_changed_letter_keeps_its_line_ends(web: Web, page: Page, end: str) -> None:
    group = buried(web, 0)
    body = end.join(["To: ann", "", "one", "two", ""])
    web.post(f"{group}/mail", body)
    bury(web, group, 1)
    page.open(f"{group}/.dead")
    (letter,) = web.get(f"{group}/dead?format=json").lines
    page.one(".messages summary").click()
    page.field(f"Body of {letter['sequence']}").send_keys("three\nfour")
    page.press("Send changed")
    page.until(lambda: page.messages() == [])
    assert [message["body"] for message in web.get(f"{group}/.consumers/mailer").lines] == [f"{body}three{end}four"]


@pytest.mark.parametrize("body", ["a\r\nb\n", "a\nb\r", "a\r\n\r\r"], ids=repr)
def test_a_letter_with_mixed_line_ends_is_not_changed(web: Web, page: Page, body: str) -> None:
    group = buried(web, 0)
    web.post(f"{group}/mail", body)
    bury(web, group, 1)
    page.open(f"{group}/.dead")
    page.one(".messages summary").click()
    page.shows(".messages .quiet", "line ends are mixed")
    assert "Send changed" not in page.texts("button")
    page.one(".messages .danger").click()
    page.confirm("dead")
    page.until(lambda: page.messages() == [])


def test_settings_and_what_is_wrong_with_them(web: Web, page: Page) -> None:
    group = web.group()
    page.open(f"{group}/")
    page.press("Settings (ctl)")
    page.field("Settings (ctl)").send_keys("depth many\n")
    page.press("Save")
    page.shows(".error", "depth: invalid bound 'many'")
    page.until(lambda: page.button("Discard changes").click() or True)
    page.field("Settings (ctl)").send_keys("\ndepth 7\nprotect on\n")
    page.press("Save")
    page.shows("#notice", "sent: depth 7 · protect on")
    assert "depth 7\n" in web.get(f"{group}/ctl").body.decode()
    page.until(lambda: not page.button("Remove group").is_enabled())
    page.shows("main .quiet", "protected")
    page.press("Refused writes")
    page.shows("main td", "depth: invalid bound 'many'")
    assert [entry for entry in page.console() if "400" not in entry["message"]] == []


def test_what_cannot_be_seen_in_a_name_is_escaped(web: Web, page: Page) -> None:
    """Neither direction nor controls of what others wrote reach the page, wherever it is shown."""
    group, name = web.group("replay all"), "abc\u202egnp.exe\u2066\x9b"
    path = f"{group}/{quote(name)}"
    assert web.put(f"{path}/").status == 201
    assert web.post(f"{path}/{quote(name)}", "a\u202eb", **{"Mqfs-H-Note": "c\u202ed".encode()}).status == 201
    assert web.put(f"{path}/.consumers/{quote(name)}").status == 201
    seen = "abc\\u{202e}gnp.exe\\u{2066}\\u{9b}"
    for where in (f"{path}/", f"{path}/{quote(name)}", f"{path}/.consumers/{quote(name)}", f"{path}/none"):
        page.open(where)
        page.shows("main, nav, header", seen)
        for row in page.driver.find_elements(By.CSS_SELECTOR, "summary"):
            row.click()
        found = page.driver.execute_script(
            "return document.title + document.body.innerText + [...document.querySelectorAll('[aria-label], [title]')]"
            ".map((one) => one.getAttribute('aria-label') + one.title).join()"
        )
        assert not re.search("[\u202a-\u202e\u2066-\u2069\x80-\x9f]", found)


def test_removing_asks_for_the_name(web: Web, page: Page) -> None:
    group = web.group()
    web.post(f"{group}/s", "x")
    page.open(f"{group}/s")
    page.press("Remove stream")
    assert not page.one("#confirm-yes").is_enabled()
    page.one("#confirm button[value=cancel]").click()
    page.press("Remove stream")
    page.confirm("s")
    page.shows("h1", group[1:])
    assert web.get(f"{group}/").json["entries"] == []


# The answers about a stream come to the page only on request.
LATE_ANSWERS = """
const soon = window.fetch;
window.late = [];
window.fetch = async (path, given) => {
  const answer = await soon(path, given);
  if (answer.status === 401 && String(path).includes("/s")) await new Promise((resolve) => window.late.push(resolve));
  return answer;
};
"""


def new_token(web: Web) -> str:
    """A token that may read, when the server knows it."""
    folder = web.server.folder
    done = mqfs("token", "new", USER, "--token-file", str(folder / "tokens"), "--scope", "read", cwd=folder)
    secret = done.stdout.strip()
    eventually(lambda: web.get("/", Authorization=f"Bearer {secret}").status != 401, "the token is known")
    return secret


def test_a_late_refusal_does_not_ask_again(web: Web, page: Page) -> None:
    secret = new_token(web)
    group = web.group()
    web.post(f"{group}/s", "x")
    page.driver.execute_script("sessionStorage.setItem('token', 'mq_wrong_token')")
    added = page.driver.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": LATE_ANSWERS})
    try:
        page.open(f"{group}/s")
        page.one("#token-input").send_keys(secret)
        page.until(lambda: page.driver.execute_script("return window.late.length"))
        page.press("Use it")
        page.driver.execute_script("window.late.forEach((resolve) => resolve())")
        page.until(lambda: page.messages() == ["x"])
        assert not page.texts("#ask-token")
    finally:
        page.driver.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", added)
        page.driver.execute_script("sessionStorage.clear()")
        page.console()


def test_a_token_is_asked_for(web: Web, page: Page) -> None:
    secret = new_token(web)
    group = web.group()
    web.post(f"{group}/s", "x")
    page.driver.execute_script("sessionStorage.setItem('token', 'mq_wrong_token')")
    try:
        page.open(f"{group}/s")
        page.shows("#ask-token", "does not know this token")
        page.one("#token-input").send_keys(secret)
        page.press("Use it")
        page.until(lambda: page.messages() == ["x"])
        page.press("Clear")
        page.confirm("s")
        page.shows(".error", "the button Token changes the user")
        assert page.driver.get_cookies() == []
        page.press("Token")
        page.press("Without a token")
        page.until(lambda: page.driver.execute_script("return sessionStorage.getItem('token')") is None)
    finally:
        page.driver.execute_script("sessionStorage.clear()")
        page.console()


# ---------------------------------------------------------------- other sites


def test_a_page_of_another_site_cannot_write(web: Web, page: Page, foreign: int) -> None:
    group = web.group()
    web.post(f"{group}/s", "x")
    page.driver.get(f"http://evil.example:{foreign}/")
    for method, path, more in (
        ("POST", "s", "mode: 'no-cors', body: 'y'"),
        ("POST", "ctl", "mode: 'no-cors', body: 'clear s'"),
        ("DELETE", "s", ""),
        ("PUT", "t", ""),
    ):
        script = f"const done = arguments[0]; fetch('{web.url}{group}/{path}', {{method: '{method}', {more}}})"
        page.driver.execute_async_script(script + ".then((answer) => done(answer.type), () => done('refused'))")
    assert [(entry["name"], entry["messages"]) for entry in web.get(f"{group}/?detail").json["entries"]] == [("s", 1)]
    read = f"const done = arguments[0]; fetch('{web.url}{group}/s').then(() => done('read'), () => done('refused'))"
    assert page.driver.execute_async_script(read) == "refused"
    page.console()


def test_the_example_follows_from_a_listed_site(web: Web, page: Page, foreign: int) -> None:
    group = web.group()
    web.post(f"{group}/s", SCRIPT)
    page.driver.get(f"http://127.0.0.1:{foreign}/tail.html?{web.url}{group}/s")
    page.until(lambda: page.texts("li") == [SCRIPT])
    web.post(f"{group}/s", "two")
    page.until(lambda: page.texts("li") == ["two", SCRIPT])
    web.ask("DELETE", f"{group}/s")
    page.until(lambda: page.driver.execute_script("return events.readyState") == 2)
    page.console()


def test_a_name_that_was_bound_to_this_machine_is_refused(web: Web, page: Page) -> None:
    page.driver.get(f"http://evil.example:{web.port}/.web/")
    assert "host 'evil.example" in page.text("body")
    page.console()


# ---------------------------------------------------------------- for everyone


@pytest.fixture(scope="module")
def views(page: Page) -> list[str]:
    """A path of each view, with something in it."""
    group = buried(page.web, 2)
    page.web.post(f"{group}/ctl", "bind all #")
    page.web.post(f"{group}/mail", json.dumps({"to": "a" * 200}))
    page.web.put(f"{group}/{'n' * 200}")
    page.web.put(f"{group}/inner/")
    return ["/", f"{group}/", f"{group}/mail", f"{group}/all", f"{group}/.consumers/mailer", f"{group}/.dead"]


def shown(page: Page, path: str) -> None:
    """A view with all its parts opened."""
    page.open(path)
    if not path.endswith((".dead", "mailer")):
        page.until(lambda: page.texts("main .figures dd"))
    if path.endswith(("mail", "mailer", "all", ".dead")):
        page.until(page.messages)
    page.driver.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    page.until(lambda: "Read again" in page.texts("button"))
    page.until(lambda: page.texts("#groups li"))


@pytest.mark.skipif(not AXE.exists(), reason="axe-core is missing: script/setup test")
@pytest.mark.parametrize(("scheme", "width"), [("light", 360), ("dark", 1_280)])
def test_every_view_can_be_used_by_everyone(page: Page, views: list[str], scheme: str, width: int) -> None:
    page.console()
    page.scheme(scheme)
    page.width(width)
    for path in views:
        shown(page, path)
        assert page.violations() == [], path
        assert page.driver.execute_script("return document.documentElement.scrollWidth") <= width, path
    assert page.console() == []


def test_the_switch_beats_the_system(page: Page) -> None:
    page.width(1_280)
    page.scheme("light")
    page.open("/")
    light = background(page)
    page.press("Theme: auto")
    page.press("Theme: light")
    assert page.text("#theme") == "Theme: dark"
    assert background(page) != light
    page.open("/")
    assert background(page) != light
    page.press("Theme: dark")
    assert background(page) == light


def background(page: Page) -> str:
    """The background of the page with its style, which may come after the page."""
    look = "return getComputedStyle(document.body).backgroundColor"
    return page.until(lambda: next((c for c in [page.driver.execute_script(look)] if c != "rgba(0, 0, 0, 0)"), None))


def test_a_button_is_found_behind_what_is_drawn_again(page: Page) -> None:
    page.open("/")
    page.one("h1")
    page.driver.execute_script(
        "let one = document.createElement('button'); document.body.prepend(one);"
        "setInterval(() => { const next = one.cloneNode(); one.replaceWith(next); one = next; }, 1)"
    )
    page.press("Help")
    page.press("Close")
    page.until(lambda: not page.driver.find_element(By.ID, "keys").is_displayed())


def test_the_keys_are_documented(page: Page) -> None:
    page.open("/")
    page.one("h1")
    page.key("?")
    keys = page.until(lambda: page.texts("#keys kbd"))
    script = "".join((ROOT / "mqfs" / "http" / "web" / name).read_text() for name in MODULES)
    for key in keys[:-1]:
        assert f"keys.{key} =" in script or f'keys["{key}"] =' in script
    page.press("Close")
    page.until(lambda: not page.driver.find_element(By.ID, "keys").is_displayed())
