"""MkDocs hook: the site has the pages of docs/README.md, and the files that they link to.

`docs/README.md` lists every page, so the navigation is read from it. A link that leads out of docs/
becomes a page under repository/: Markdown as it is, other files as code.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from posixpath import normpath, relpath

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).resolve().parent.parent
_LINK = re.compile(r"(?<=\]\()(?!https?:|mailto:|#)([^)#\s]+)")
_SECTION = re.compile(r"^\*\*(.+)\*\*$")
_ENTRY = re.compile(r"\[([^\]]+)\]\((?!https?:)([^)#\s]+)\)")
_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)


def _source(page: str) -> str:
    """The path in the repository of a page of the site, both relative to their roots."""
    if page.startswith("repository/"):
        path = page.removeprefix("repository/")
        return path if (_ROOT / path).exists() else path.removesuffix(".md")
    return f"docs/{page}"


def _page(source: str) -> str:
    """The page of the site that shows a file of the repository."""
    if (_ROOT / source).is_dir():
        source += "/README.md"
    if source.startswith("docs/"):
        return source.removeprefix("docs/")
    return f"repository/{source}" + ("" if source.endswith(".md") else ".md")


def _linked(page: str, link: str) -> str:
    """The page that a link of `page` leads to."""
    return _page(normpath(f"{PurePosixPath(_source(page)).parent}/{link}"))


def _content(page: str) -> str:
    source = _source(page)
    text = (_ROOT / source).read_text(encoding="utf-8")
    if source.endswith(".md"):
        return text
    return f"# {source}\n\n````{PurePosixPath(source).suffix[1:]}\n{text}````\n"


def _links(page: str) -> list[str]:
    """The pages that `page` links to; only Markdown has links."""
    if not _source(page).endswith(".md"):
        return []
    return [_linked(page, link) for link in _LINK.findall(_FENCE.sub("", _content(page)))]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Read the navigation from the bold titles and lists of docs/README.md."""
    sections: list[dict[str, list[dict[str, str]]]] = []
    text = (_ROOT / "docs/README.md").read_text(encoding="utf-8")
    for line in text.splitlines():
        if title := _SECTION.match(line):
            sections.append({title[1]: []})
        for name, link in _ENTRY.findall(line):
            entries = next(iter(sections[-1].values()))
            entries.append({name[:1].upper() + name[1:]: _linked("README.md", link)})
    config.nav = [{"Documentation": "README.md"}, *sections]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every file outside docs/ that a page leads to."""
    waiting = [file.src_uri for file in files.documentation_pages()]
    while waiting:
        for page in _links(waiting.pop()):
            if page.startswith("repository/") and files.get_file_from_path(page) is None:
                files.append(File.generated(config, page, content=_content(page)))
                waiting.append(page)
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links between files of the repository into links between pages of the site."""
    here = page.file.src_uri
    if not _source(here).endswith(".md"):
        return markdown
    return _LINK.sub(lambda link: relpath(_linked(here, link[1]), str(Path(here).parent)), markdown)
