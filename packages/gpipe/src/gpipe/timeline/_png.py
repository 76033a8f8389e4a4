"""Pictures in pixels, for where SVG is not taken, such as slides."""

from __future__ import annotations


def png(picture: str) -> bytes:
    """The picture as PNG, light, two pixels for each of its own.

    Args:
        picture: SVG.

    Returns:
        The bytes of a file.

    Raises:
        ImportError: resvg-py is not installed; it is an extra.
    """
    try:
        from resvg_py import svg_to_bytes
    except ImportError as error:
        raise ImportError(
            "path: a name that ends in .png needs resvg-py; install the extra gpipe-torch[png], or resvg-py, or save "
            "as .svg or .html"
        ) from error
    return bytes(svg_to_bytes(svg_string=picture, zoom=2))
