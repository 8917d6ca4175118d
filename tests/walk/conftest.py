"""Fixtures of the tests that run documented commands."""

from tests.cli.conftest import run_cli

__all__ = ["run_cli"]
