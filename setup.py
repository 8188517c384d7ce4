"""Build hook for setuptools; every setting is in pyproject.toml."""

from setuptools import setup

setup()
