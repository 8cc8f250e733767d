"""Lets tools that know only setup.py build this package; everything is said in pyproject.toml."""

from setuptools import setup

setup()
