"""Show the examples of docstrings as code: a Griffe extension that fences blocks of ``>>>`` lines."""

import re

import griffe

EXAMPLE = re.compile(r"(?m)^>>> .*(?:\n(?!\n|$).*)*")


class FencedExamples(griffe.Extension):
    """Put every example of a docstring into a fenced block."""

    def on_object(self, *, obj, **kwargs):
        """Rewrite the docstring of one object, if it has one."""
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(r"```python\n\g<0>\n```", obj.docstring.value)
