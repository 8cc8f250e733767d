"""Opens pages in a real browser (Qt WebEngine, which is Chromium) without a display.

python tests/browser.py FOLDER_OF_SCREENSHOTS PAGE.html...    WIDTH=390 for a phone's

Prints JSON by page: first heading, pictures that did not load, console messages, pixels by which
the page is wider than the window, flags that a line break splits.

python tests/browser.py --search PAGE.html QUERY...

Prints as JSON, by query, what the page's search finds: addresses of pages, best first.
"""

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.update(  # before Qt is loaded
    QT_QPA_PLATFORM="offscreen",
    QTWEBENGINE_DISABLE_SANDBOX="1",  # tests run as root in containers
    QTWEBENGINE_CHROMIUM_FLAGS="--disable-gpu",
    QT_LOGGING_RULES="*=false",
)

from PySide6.QtCore import QTimer, QUrl
from PySide6.QtWebEngineCore import QWebEnginePage
from PySide6.QtWebEngineWidgets import QWebEngineView
from PySide6.QtWidgets import QApplication

_LOOK = """JSON.stringify({
    heading: document.querySelector("article h1")?.firstChild?.textContent ?? "",
    missing: [...document.images].filter(x => x.complete && !x.naturalWidth).map(x => x.src),
    wider: document.documentElement.scrollWidth - window.innerWidth,
    split: [...document.querySelectorAll(".flags td:first-child code")]
        .filter(x => x.getClientRects().length > 1).map(x => x.textContent),
    scripts: [...document.querySelectorAll("script[src], link[rel=stylesheet]")]
        .map(x => x.src || x.href),
})"""
_FIND = """(() => {
    const input = document.querySelector("[data-md-component=search-query]");
    document.querySelector("#__search").click();
    input.focus();
    input.value = WORDS;
    input.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
    input.dispatchEvent(new InputEvent("input", {bubbles: true}));
})()"""
_FOUND = """JSON.stringify(
    [...document.querySelectorAll(".md-search-result__item > .md-search-result__link")]
        .map(x => x.getAttribute("href"))
)"""
_PAINTED_MS, _SEARCHED_MS = 300, 200
_SEARCHES = 25  # looks at what the search has found for one query
_AT_ONCE = 4  # pages: most of a visit is waiting


class Page(QWebEnginePage):
    """A page that records console messages."""

    def __init__(self, view: QWebEngineView) -> None:
        super().__init__(view)
        self.said: list[str] = []

    def javaScriptConsoleMessage(self, level, message, line, source) -> None:
        self.said.append(f"{source}:{line}: {message}")


class NodeShards:
    """Opens pages one after another, and calls `ended` after the last."""

    def __init__(self, shots: Path, pages: list[Path], ended: Callable[[], None]) -> None:
        self.shots, self.todo, self.ended, self.found = shots, pages, ended, {}
        self.view = QWebEngineView()
        self.page = Page(self.view)
        self.view.setPage(self.page)
        self.view.resize(int(os.environ.get("WIDTH", "1300")), 1000)
        self.view.loadFinished.connect(self.look)
        self.view.show()
        self.open()

    def open(self) -> None:
        if not self.todo:
            self.ended()
            return
        self.page.said = []
        self.view.load(QUrl.fromLocalFile(str(self.todo[0].resolve())))

    def look(self, loaded: bool) -> None:
        self.page.runJavaScript(_LOOK, lambda text: self.note(loaded, text))

    def note(self, loaded: bool, text: str) -> None:
        self.found[str(self.todo[0])] = json.loads(text) | {"loaded": loaded}
        QTimer.singleShot(_PAINTED_MS, self.shoot)

    def shoot(self) -> None:
        page = self.todo.pop(0)
        self.found[str(page)]["console"] = self.page.said
        name = "-".join(page.with_suffix(".png").parts[-2:])
        self.view.grab().save(str(self.shots / name))
        self.open()


def look_at(shots: Path, pages: list[Path]) -> dict[str, dict]:
    """What is found on each page, several at once."""
    application = QApplication(sys.argv[:1])

    def quit_after_the_last() -> None:
        if not any(visit.todo for visit in visits):
            application.quit()

    parts = [pages[first::_AT_ONCE] for first in range(min(_AT_ONCE, len(pages)))]
    visits = [NodeShards(shots, part, quit_after_the_last) for part in parts]
    application.exec()
    return {page: found for visit in visits for page, found in visit.found.items()}


def search(path: Path, queries: list[str]) -> dict[str, list[str]]:
    """The pages that a page's search finds for each query; none if it does not answer."""
    application = QApplication(sys.argv[:1])
    view, found, todo = QWebEngineView(), {query: [] for query in queries}, ["", *queries]
    page = Page(view)
    view.setPage(page)
    view.resize(1300, 1000)
    looks = 0

    def note(text: str) -> None:
        """An answer to the first of the queries; to the empty one it is an empty list."""
        nonlocal looks
        if not todo or not text:
            return
        looks, answered = looks + 1, bool(json.loads(text)) == bool(todo[0])
        if not answered and looks < _SEARCHES:
            return
        looks, query = 0, todo.pop(0)
        if query:
            found[query] = [href.partition("?")[0] for href in json.loads(text)]
            if todo:
                todo.insert(0, "")  # so that no answer is taken for another query's
        if todo:
            ask(todo[0])
        else:
            timer.stop()
            application.quit()

    def ask(words: str) -> None:
        page.runJavaScript(_FIND.replace("WORDS", json.dumps(words)))

    timer = QTimer()
    timer.timeout.connect(lambda: page.runJavaScript(_FOUND, note))

    def start() -> None:
        ask("")
        timer.start(_SEARCHED_MS)

    view.loadFinished.connect(lambda _: QTimer.singleShot(_PAINTED_MS, start))
    view.load(QUrl.fromLocalFile(str(path.resolve())))
    view.show()
    application.exec()
    print("\n".join(page.said), file=sys.stderr)
    return found


if __name__ == "__main__":
    if sys.argv[1] == "--search":
        print(json.dumps(search(Path(sys.argv[2]), sys.argv[3:])))
    else:
        print(json.dumps(look_at(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])))
