"""Showing a plan: a table for the terminal, and a page for the browser."""
