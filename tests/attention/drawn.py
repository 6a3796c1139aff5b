"""Draws numbers of rows and keys: around the edges of tiles, and with keys - rows from -3 to 3."""

from hypothesis import strategies as st

EDGES = (16, 32, 64, 128, 192, 256)  # of the tiles and blocks of all backends


@st.composite
def lengths(draw: st.DrawFn, least: int = 1, most: int = 300) -> tuple[int, int]:
    """(rows, keys)."""
    edges = st.sampled_from([edge for edge in EDGES if edge + 3 <= most])
    beside = st.builds(lambda edge, over: edge + over, edges, st.integers(-3, 3))
    rows = draw(st.one_of(beside, st.integers(least, most)))
    diagonal = st.integers(-3, 3).map(lambda over: max(least, rows + over))
    return rows, draw(st.one_of(diagonal, beside, st.integers(least, most)))
