"""The page: everything in one file, escaped, with text alternatives; opened in a real browser where there is one."""

import http.server
import re
import shutil
import subprocess
import sys
import threading
from html.parser import HTMLParser

import pytest

from simcse_weince.page import Page, new_figure

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
NASTY = '<script>alert("x")</script> & "quotes" \'and\' λ'


class Reader(HTMLParser):
    """Collects tags with their attributes and the visible text, and holds every tag to be closed."""

    VOID = frozenset({"meta", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.words, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        self.open += [] if tag in self.VOID else [tag]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def open_in_chromium(folder):
    """Serve a folder and open its ``page.html`` in headless chromium.

    Returns:
        The paths that were requested, the log with all console messages, and the page as the browser understood it.
    """
    requests = []

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_request(self, *args):
            requests.append(self.path)

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    command = [
        *(CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"),
        *(f"--user-data-dir={folder / 'profile'}", f"http://127.0.0.1:{server.server_port}/page.html"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    server.shutdown()
    server.server_close()
    return requests, done.stderr, done.stdout


def sample_page():
    page = Page(NASTY, lead=f"Verdict: {NASTY}")
    page.heading(f"Heading {NASTY}")
    page.text(f"Paragraph {NASTY}")
    page.table(["name", NASTY], [[NASTY, 0.123456], ["two", None], ["three", 12345]], caption=NASTY)
    for name in ("first", "second"):
        figure = new_figure()
        figure.subplots().plot([1, 2, 3])
        page.figure(figure, alt=f"A line. {NASTY}", caption=NASTY, name=name)
    return page


def test_page_is_escaped_and_self_contained(tmp_path):
    sample_page().write(tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    reader = Reader(text)
    names = [tag for tag, _ in reader.tags]
    assert "script" not in names and "link" not in names
    assert not re.search(r"(?:src|href)=\"(?!data:)|url\(|@import|https?://", text)
    images = [attributes for tag, attributes in reader.tags if tag == "img"]
    assert len(images) == 2
    assert all(NASTY in image["alt"] and image["src"].startswith("data:image/png;base64,iVBOR") for image in images)
    words = "".join(reader.words)
    assert words.count(NASTY) == 10 and "0.1235" in words and "12,345" in words and "–" in words
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in reader.tags


def test_the_lead_stands_before_everything_but_the_title(tmp_path):
    sample_page().write(tmp_path / "page.html")
    body = (tmp_path / "page.html").read_text(encoding="utf-8").split("<body>")[1]
    assert body.index("<h1>") < body.index("Verdict:") < body.index("Heading")


def test_the_same_figures_are_files_and_the_page_is_reproducible(tmp_path):
    page = sample_page()
    page.write_figures(tmp_path / "plots")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["01-first.png", "02-second.png"]
    assert (tmp_path / "plots" / "01-first.png").read_bytes().startswith(b"\x89PNG")
    page.write(tmp_path / "a.html")
    sample_page().write(tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()


def test_missing_matplotlib_is_one_sentence_with_the_command_that_installs_it():
    program = (
        "import sys\nsys.modules['matplotlib'] = None\n"
        "from simcse_weince.page import Page, new_figure\nPage('t', 'l')\nnew_figure()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert "InputError: figures need matplotlib; pip install 'simcse-weince[report]'" in done.stderr


def test_figures_leave_no_global_state():
    program = (
        "import sys\nfrom simcse_weince.page import new_figure\nnew_figure().subplots()\n"
        "sys.exit('matplotlib.pyplot' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_the_page_opens_in_a_browser_without_console_error_or_request(tmp_path):
    """Served by a local server that counts requests: the page is one of them, and there is no other."""
    sample_page().write(tmp_path / "page.html")
    requests, log, dom = open_in_chromium(tmp_path)
    assert requests == ["/page.html"]
    assert "CONSOLE" not in log
    assert "Verdict: " in dom and dom.count("<img") == 2


def test_the_browser_test_can_fail(tmp_path):
    """A page with a picture from elsewhere is told by the same look at it."""
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    (tmp_path / "page.html").write_text("<!doctype html><title>t</title><img src=other.png><script>oh()</script>")
    requests, log, _ = open_in_chromium(tmp_path)
    assert "/other.png" in requests and "CONSOLE" in log
