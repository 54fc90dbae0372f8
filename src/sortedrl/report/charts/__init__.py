"""SVG charts: a canvas with axes, and one module per family of charts."""
