"""One API with two hours of traffic for the tests of reports."""

from collections.abc import Iterator

import pytest

from agent.outputs.report.figures import ReportFigures
from tests.outputs.api.serving import Api, open_api
from tests.outputs.report.reported import figures, filled


@pytest.fixture(scope="package")
def reported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """An API with traffic and a fixed clock."""
    with open_api(tmp_path_factory.mktemp("reported")) as api:
        filled(api)
        yield api


@pytest.fixture(scope="package")
def read(reported: Api) -> ReportFigures:
    """The figures of the two hours."""
    return figures(reported)
