"""A page inside of a notebook."""

from __future__ import annotations

from html import escape


def framed(page: str) -> str:
    """``page`` in a frame of its own: neither it nor the notebook can change the other's looks."""
    return (
        f'<iframe srcdoc="{escape(page)}" sandbox="allow-scripts" title="recollect" '
        'style="width:100%;height:640px;border:1px solid #8884;border-radius:6px"></iframe>'
    )
