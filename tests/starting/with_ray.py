"""Imported after that: who wants Ray then imports it."""

import sys

del sys.modules["ray"]
