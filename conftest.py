"""Collect the commands and the Python of the pages as tests (`tests/tools/pages.py`)."""

import os
from pathlib import Path

import pytest

from tests.tools.pages import PythonOfPage, make_hub, pages

pytest_collect_file = pages().pytest()


@pytest.fixture(scope="module")
def page_directory(request, tmp_path_factory):
    """Return the directory in which a page's blocks run."""
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="session")
def hub(tmp_path_factory):
    """Return a function to a cache of the hub: of small models, or of published configs alone."""
    # All workers have one, which the server of the pages' Python knows.
    shared = Path(os.environ.get("WARM_HUB") or tmp_path_factory.mktemp("hub"))
    return lambda published: make_hub(shared / ("configs" if published else "models"), published)


@pytest.fixture(scope="module")
def python_of_page(page_directory):
    """Return a function from an environment to the process that executes the page's Python."""
    started = []

    def start(environment):
        if not started:
            started.append(PythonOfPage(page_directory, environment))
        return started[0]

    yield start
    for process in started:
        process.close()
