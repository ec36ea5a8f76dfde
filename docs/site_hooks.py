"""Pages of the documentation site that come from code or from files outside docs/ (hooks of mkdocs.yml).

https://www.mkdocs.org/user-guide/configuration/#hooks
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]  # mkdocs runs from anywhere

from reference import commands_page, keys_page  # noqa: E402

ROOT_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changes.md"}
"""Files of the repository's top level that are pages of the site."""
LINK = re.compile(r"`[^`\n]*`|(?<=\]\()(?!https?:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?(?=\))")
"""The target of a Markdown link to a file; or code, in which there are no links, such as a regular expression."""
LEXERS = {".py": "python", ".toml": "toml", ".txt": "text", ".yaml": "yaml", ".yml": "yaml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the reference, the pages of the top level, and every source file that a page links to."""
    pages = {"reference/commands.md": commands_page(), "reference/keys.md": keys_page()}
    for name, uri in ROOT_PAGES.items():
        pages[uri] = _rewrite(f"{ROOT.as_posix()}/{name}", (ROOT / name).read_text(), uri)
    texts = [(ROOT / "docs" / file.src_uri, file.content_string) for file in files.documentation_pages()]
    texts += [(ROOT / name, (ROOT / name).read_text()) for name in ROOT_PAGES]
    for source in sorted({target for path, text in texts for target in _sources(path, text)}):
        pages[_source_uri(source)] = _source_page(source)
    for uri, content in pages.items():
        files.append(File.generated(config, uri, content=content))
    return files


def on_page_markdown(markdown: str, page: object, config: MkDocsConfig, files: Files) -> str:
    """Point links that leave docs/ to the pages added for them."""
    uri = page.file.src_uri  # pyright: ignore[reportAttributeAccessIssue]
    if uri in ROOT_PAGES.values():
        return markdown
    return _rewrite(f"{ROOT.as_posix()}/docs/{uri}", markdown, uri)


def _sources(page: Path, text: str) -> set[Path]:
    """Return the files outside docs/ that a page links to, as paths in the repository."""
    found = {(page.parent / match["path"]).resolve() for match in LINK.finditer(text) if match["path"]}
    inside = {path.relative_to(ROOT) for path in found if path.is_file() and path.is_relative_to(ROOT)}
    return {path for path in inside if not _is_page(path) and path.as_posix() not in ROOT_PAGES}


def _rewrite(page: str, text: str, uri: str) -> str:
    """Return a page's text with links relative to where the site has the page."""
    depth = "../" * uri.count("/")

    def target(match: re.Match[str]) -> str:
        if match["path"] is None:
            return match[0]
        path = (Path(page).parent / match["path"]).resolve()
        if not path.is_relative_to(ROOT):
            return match[0]
        inside = path.relative_to(ROOT)
        if _is_page(inside):
            return f"{depth}{inside.relative_to('docs').as_posix()}{match['anchor'] or ''}"
        if inside.as_posix() in ROOT_PAGES:
            return f"{depth}{ROOT_PAGES[inside.as_posix()]}{match['anchor'] or ''}"
        return f"{depth}{_source_uri(inside)}" if path.is_file() else match[0]

    return LINK.sub(target, text)


def _is_page(path: Path) -> bool:
    """Return whether the site has a file as it is: all of docs/ but its code."""
    return path.parts[0] == "docs" and path.suffix not in (".py", ".yaml")


def _source_uri(path: Path) -> str:
    return f"source/{path.as_posix()}.md"


def _source_page(path: Path) -> str:
    text = (ROOT / path).read_text()
    return f"# {path.as_posix()}\n\n````{LEXERS.get(path.suffix, 'text')}\n{text.rstrip()}\n````\n"
