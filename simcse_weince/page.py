"""One self-contained HTML page for whatever the commands find: it opens from disk, offline, on a phone or a desk.

Nothing on a page is fetched and no script runs: figures are PNG images inside the file, and the page's own security
policy forbids everything else. All text is escaped.
"""

import base64
import html
import io
import os
import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import simcse_weince
from simcse_weince.errors import import_extra
from simcse_weince.outputs import replacing, write_text

_STYLE = """
:root { color-scheme: light dark; --ink: light-dark(#1d2530, #dfe5ee); --paper: light-dark(#fff, #14181f);
  --faint: light-dark(#5b6675, #9aa6b6); --rule: light-dark(#d8dee6, #333c49); --lead: light-dark(#eef4fb, #1c2633); }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 76rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .5rem 0 1rem; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; padding-top: .8rem; border-top: 1px solid var(--rule); }
p { max-width: 46rem; margin: .6rem 0; }
p.lead { font-size: 1.1rem; max-width: none; padding: .8rem 1rem; background: var(--lead);
  border-left: 4px solid light-dark(#2f6fb3, #6aa8ea); }
code { white-space: nowrap; }
.figures { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; max-width: 44rem; }
figure img { display: block; width: 100%; height: auto; background: #fff; border: 1px solid var(--rule); }
figcaption, caption, footer { color: var(--faint); font-size: .88rem; text-align: left; padding: .35rem 0; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .94rem; }
th, td { padding: .3rem .8rem .3rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid var(--rule); }
tbody th { font-weight: normal; min-width: 9rem; }
.number { text-align: right; white-space: nowrap; }
"""

_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
"""


def new_figure(width: float = 6.4, height: float = 4.0) -> Any:
    """An empty ``matplotlib.figure.Figure`` that belongs to no window and no global state, in inches.

    Raises:
        InputError: matplotlib is not installed.
    """
    figures = import_extra("matplotlib.figure", "report", "figures need matplotlib")
    return figures.Figure(figsize=(width, height), layout="constrained")


def label(name: str) -> str:
    """A name for a legend or an axis, where a pair of $ would begin a formula and a leading _ hide the line."""
    return (" " if name.startswith("_") else "") + name.replace("$", r"\$")


class Page:
    """A page that is filled from top to bottom and then written.

    Args:
        title: Title and first heading.
        lead: The verdict in plain words, which stands at the top, a paragraph per line.
    """

    def __init__(self, title: str, lead: str = "") -> None:
        self.title, self.lead = title, lead
        self._blocks: list[tuple[str, str]] = []  # (kind, HTML)
        self._images: list[tuple[str, bytes]] = []  # (name, PNG)
        for paragraph in lead.splitlines():
            # An option is not broken at its hyphens.
            words = re.sub(r"--\w+ \S+", r"<code>\g<0></code>", _escaped(paragraph))
            self._blocks.append(("text", f'<p class="lead">{words}</p>'))

    def heading(self, text: str) -> None:
        """Begin a section."""
        self._blocks.append(("heading", f"<h2>{_escaped(text)}</h2>"))

    def text(self, paragraph: str) -> None:
        """Add a paragraph."""
        self._blocks.append(("text", f"<p>{_escaped(paragraph)}</p>"))

    def table(self, header: Sequence[str], rows: Iterable[Sequence[Any]], caption: str = "") -> None:
        """Add a table, which scrolls in a box of its own where it is wider than the screen.

        Args:
            header: Names of the columns.
            rows: Cells, the first of each row being its heading. Floats get four digits, whole numbers separators of
                thousands, None a dash.
            caption: What the table shows.
        """
        cells = [[_cell(value) for value in row] for row in rows]
        # A column of numbers is right-aligned, and so is its title.
        numeric = [any(map(_is_number, column)) for column in zip(*cells, strict=True)] or [False] * len(header)
        styles = ["", *(' class="number"' if number else "" for number in numeric[1:])]
        titles = "".join(
            f'<th scope="col"{style}>{_escaped(name)}</th>' for name, style in zip(header, styles, strict=True)
        )
        lines = []
        for row in cells:
            data = (f"<td{style}>{cell}</td>" for cell, style in zip(row[1:], styles[1:], strict=True))
            lines.append(f'<tr><th scope="row">{row[0]}</th>{"".join(data)}</tr>')
        caption = f"<caption>{_escaped(caption)}</caption>" if caption else ""
        body = f"<thead><tr>{titles}</tr></thead><tbody>{''.join(lines)}</tbody>"
        self._blocks.append(("table", f'<div class="scroll" tabindex="0"><table>{caption}{body}</table></div>'))

    def figure(self, figure: Any, alt: str, caption: str = "", name: str = "figure") -> None:
        """Add a matplotlib figure; figures that follow one another stand side by side where there is room.

        Args:
            figure: The figure, from `new_figure`.
            alt: What it shows, for people who cannot see it.
            caption: What stands below it.
            name: Name of its file for `write_figures`, without number and ending.
        """
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, metadata={"Software": None})
        self._images.append((name, image.getvalue()))
        source = base64.b64encode(image.getvalue()).decode("ascii")
        caption = f"<figcaption>{_escaped(caption)}</figcaption>" if caption else ""
        image_tag = f'<img alt="{_escaped(alt)}" src="data:image/png;base64,{source}">'
        self._blocks.append(("figure", f"<figure>{image_tag}{caption}</figure>"))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page, whole or not at all."""
        parts = [_HEAD, f"<title>{_escaped(self.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<main>\n"]
        parts.append(f"<h1>{_escaped(self.title)}</h1>\n")
        for kind, blocks in groupby(self._blocks, key=lambda block: block[0]):
            content = "\n".join(block[1] for block in blocks)
            parts.append(f'<div class="figures">\n{content}\n</div>\n' if kind == "figure" else f"{content}\n")
        parts.append(f"</main>\n<footer>simcse-weince {simcse_weince.__version__}</footer>\n</body>\n</html>\n")
        write_text(path, "".join(parts))

    def write_figures(self, folder: str | os.PathLike[str]) -> None:
        """Write the figures as PNG files of ``folder``, numbered as they stand on the page: ``01-name.png`` ..."""
        for number, (name, image) in enumerate(self._images, start=1):
            with replacing(Path(folder, f"{number:02d}-{name}.png")) as temporary:
                temporary.write_bytes(image)


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return "–" if value is None else f"{value:,}" if type(value) is int else _escaped(str(value))


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell[:1] in ("-", "+", "[") or cell in ("nan", "inf")
