"""The version of the package, written here and nowhere else (meson.build reads this file)."""

__version__ = "0.1.0"
