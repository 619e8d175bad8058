"""SVG pictures with escaped text and a description for screen readers."""

from xml.etree import ElementTree

from attnrx.reports.numbers import Number


class Drawing:
    """An SVG picture under construction; colours come from the classes of the page's style sheet."""

    def __init__(self, width: Number, height: Number, title: str, description: str = ""):
        box = f"0 0 {_coordinate(width)} {_coordinate(height)}"
        size = {"width": _coordinate(width), "height": _coordinate(height)}
        self._root = ElementTree.Element("svg", {"viewBox": box, "role": "img", "aria-label": title, **size})
        if description:
            ElementTree.SubElement(self._root, "desc").text = description

    def add(self, shape: str, style: str, tip: str = "", **attributes: Number | str) -> None:
        """Adds one shape; `style` are its CSS classes and `tip` is its tooltip."""
        written = {name.replace("_", "-"): _coordinate(value) for name, value in attributes.items()}
        element = ElementTree.SubElement(self._root, shape, {"class": style, **written})
        if tip:
            ElementTree.SubElement(element, "title").text = tip

    def text(self, x: Number, y: Number, words: str, style: str = "label", anchor: str = "start") -> None:
        """Adds text whose baseline starts, ends or is centred at a point."""
        attributes = {"x": _coordinate(x), "y": _coordinate(y), "text-anchor": anchor, "class": style}
        ElementTree.SubElement(self._root, "text", attributes).text = words

    def svg(self) -> str:
        """Returns the finished picture as markup for an HTML page."""
        return ElementTree.tostring(self._root, encoding="unicode", short_empty_elements=True)


def _coordinate(value: Number | str) -> str:
    # Two decimals are a hundredth of a pixel; more only increase the page size.
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")
