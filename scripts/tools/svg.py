"""A drawing as SVG, of text, boxes and lines, readable on a light and a dark page. Not a command of
its own.
"""

from pathlib import Path
from xml.sax.saxutils import escape

from utils.errors import UserError
from utils.files import replace_file

STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.title { font-weight: 600 }
.note { fill: #59636e }
.inside { fill: #101418; font-size: 11px }
line, .frame { stroke: #8c959f; fill: none }
marker path { fill: #8c959f }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 }
  .note { fill: #9198a1 }
}"""
HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7"'
    ' orient="auto"><path d="M0 0.5 8 4 0 7.5z"/></marker>'
)
# Of middle lightness, so that dark letters inside and both pages behind stand out.
COLOURS = {
    "grey": "#a8adb3",
    "blue": "#6ea3f5",
    "orange": "#f0a35e",
    "green": "#63bd7a",
    "red": "#e8716b",
}


class DrawingError(UserError):
    """The file cannot be written; the message says why."""

    exit_status = 2


class Drawing:
    """Elements of an SVG, kept until ``save``; coordinates are pixels from the upper left."""

    def __init__(self) -> None:
        self.elements: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line of text on the base line ``y``."""
        self.elements.append(
            f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, colour: str = "") -> None:
        """Draw a box, filled with one of ``COLOURS``, or a frame."""
        look = f'fill="{COLOURS[colour]}"' if colour else 'class="frame"'
        self.elements.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" {look}/>'
        )

    def line(
        self, x: float, y: float, to_x: float, to_y: float, arrow: bool = False, colour: str = ""
    ) -> None:
        """Draw a line, or an arrow, grey or in one of ``COLOURS``."""
        look = ' marker-end="url(#head)"' if arrow else ""
        if colour:
            look += f' style="stroke:{COLOURS[colour]};stroke-width:2"'
        self.elements.append(
            f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{to_x:.1f}" y2="{to_y:.1f}"{look}/>'
        )

    def save(self, path: Path, width: float, height: float, title: str, origin: str) -> None:
        """Write the file.

        Args:
            path: of the file.
            width, height: of the whole drawing.
            title: what it shows, for those who cannot see it.
            origin: the commands that made it.

        Raises:
            DrawingError: the file cannot be written.
        """
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}"'
            f' width="{width:.0f}" role="img">',
            f"<title>{escape(title)}</title>",
            # Not a comment, in which XML allows no two hyphens.
            f"<desc>\n{escape(origin)}\n</desc>",
            f"<style>\n{STYLE}\n</style>",
            f"<defs>{HEAD}</defs>",
            *self.elements,
            "</svg>",
        ]
        try:
            replace_file(path, ("\n".join(lines) + "\n").encode())
        except OSError as error:
            raise DrawingError(f"cannot write {path}: {error}") from error
