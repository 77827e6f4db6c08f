"""Timelines as text, SVG, a page, and Chrome traces."""
