"""The version of this code, also where it runs from a checkout and no installed package has one."""

__version__ = "0.1.0"
