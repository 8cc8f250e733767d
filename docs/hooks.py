"""What mkdocs does beside rendering docs/: links that leave it lead somewhere too.

mkdocs.yml names this file. READMEs of other directories are pages of the site. A link to any other
file of the repository gets a copy of it.
"""

import re
from pathlib import Path
from posixpath import relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = "docs/"
# pages of the site that are elsewhere in the repository
ELSEWHERE = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks/harness.md",
    "examples/README.md": "examples.md",
    "patches/README.md": "patches.md",
}
# pages that others link to, but neither the navigation nor the search has
ASIDE = {
    "LICENSES.md": "licences.md",
    "benchmarks/columns.md": "benchmarks/columns.md",
    "conformance/README.md": "conformance.md",
    "conformance/upstream/README.md": "upstream.md",
    "tests/README.md": "tests.md",
}
PAGES = ELSEWHERE | ASIDE
# how much more, or less, pages count in the search, by the beginning of their address
BOOST = {"start/": 2.0, "how-to/": 2.0, "troubleshooting.md": 2.0, "decisions/": 0.3,
         "changelog.md": 0.3, "reference/errors.md": 0.3,
         "reference/transformers.md": 0.2, "benchmarks/losses.md": 0.3}  # fmt: skip
_LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in docs/."""
    for path, uri in PAGES.items():
        level = InclusionLevel.NOT_IN_NAV if path in ASIDE else InclusionLevel.UNDEFINED
        content = (ROOT / path).read_text()
        files.append(File.generated(config, uri, content=content, inclusion=level))
    for file in files.documentation_pages():
        for path in _outside(file.content_string, _source(file.src_uri)):
            copy = f"files/{path}"
            if (ROOT / path).is_file() and files.get_file_from_path(copy) is None:
                files.append(File.generated(config, copy, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links of the repository at pages and files of the site."""
    uri = page.file.src_uri
    source = _source(uri)
    if source in ASIDE:
        page.meta["search"] = {"exclude": True}
    for begins, boost in BOOST.items():
        if uri.startswith(begins):
            page.meta["search"] = {"boost": boost}

    def target(match: re.Match) -> str:
        path = _resolved(match[1], source)
        return relpath(_uri(path), Path(uri).parent.as_posix())

    return _LINK.sub(target, markdown)


def _source(uri: str) -> str:
    """Where a page is in the repository."""
    return {page: path for path, page in PAGES.items()}.get(uri, DOCS + uri)


def _resolved(link: str, source: str) -> str:
    """The repository's path of a link; a directory's is its README's."""
    path = (ROOT / source).parent.joinpath(link).resolve().relative_to(ROOT)
    return (path / "README.md" if (ROOT / path).is_dir() else path).as_posix()


def _outside(markdown: str, source: str) -> set[str]:
    """Files that are linked, are in the repository, and are no pages."""
    found = {_resolved(link, source) for link in _LINK.findall(markdown)}
    return {path for path in found if not path.startswith(DOCS) and path not in PAGES}


def _uri(path: str) -> str:
    """The site's address of a path of the repository."""
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return PAGES.get(path, f"files/{path}")
