"""Charts as SVG: a canvas, axes, and one module for each family of pictures."""
