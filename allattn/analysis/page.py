"""One HTML file that opens anywhere: headings, sentences, tables and pictures, nothing fetched."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from html import escape
from typing import Any

from matplotlib.figure import Figure

from allattn.analysis.figures import png

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 80em; margin: 2em auto; padding: 0 1em;
       color: #222; background: #fff; }
h1 { font-size: 1.5em } h2 { font-size: 1.2em; margin-top: 2em; border-top: 1px solid #ddd;
     padding-top: 1em }
p { max-width: 50em } img { max-width: 100% }
.scroll { overflow-x: auto }
table { border-collapse: collapse; font-size: 13px; margin: 1em 0 }
th, td { padding: 2px 9px; text-align: right; border-bottom: 1px solid #eee; white-space: nowrap }
th { border-bottom: 1px solid #999 } td.text, th.text { text-align: left }
"""


class Page:
    """Collects the parts of a page; `html` puts them together.

    Attributes:
        pictures: PNG files by name, for those who want them apart.
    """

    def __init__(self, title: str):
        """An empty page."""
        self.title, self.pictures = title, dict[str, bytes]()
        self._parts = [f"<h1>{escape(title)}</h1>"]

    def section(self, title: str, *paragraphs: str) -> None:
        """A heading and what there is to say."""
        self._parts.append(f"<h2>{escape(title)}</h2>")
        self._parts += [f"<p>{escape(text)}</p>" for text in paragraphs]

    def picture(self, name: str, figure: Figure, description: str) -> None:
        """A figure, which is closed."""
        self.pictures[f"{name}.png"] = content = png(figure)
        data = base64.b64encode(content).decode("ascii")
        self._parts.append(
            f'<div class="scroll"><img alt="{escape(description, quote=True)}" '
            f'src="data:image/png;base64,{data}"></div>'
        )

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """Rows of text and numbers; None is a dash."""
        texts = [[isinstance(row[i], str) for row in rows] for i in range(len(columns))]
        kinds = [' class="text"' if any(texts[i]) else "" for i in range(len(columns))]
        head = "".join(f"<th{k}>{escape(c)}</th>" for c, k in zip(columns, kinds, strict=True))
        body = "\n".join(
            "<tr>"
            + "".join(f"<td{k}>{escape(cell(v))}</td>" for v, k in zip(row, kinds, strict=True))
            + "</tr>"
            for row in rows
        )
        self._parts.append(
            f'<div class="scroll"><table><thead><tr>{head}</tr></thead>\n'
            f"<tbody>{body}</tbody></table></div>"
        )

    def html(self) -> str:
        """The whole file."""
        parts = "\n".join(self._parts)
        return (
            '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>{_STYLE}</style></head>\n"
            f"<body>\n{parts}\n</body></html>\n"
        )


def cell(value: Any) -> str:
    """A number as people read it."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
