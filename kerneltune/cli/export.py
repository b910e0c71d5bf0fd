"""Placeholder until this command lands."""

import typer


def register(app: typer.Typer) -> None:
    """Nothing yet."""
