"""`python -m tests.outputs.report.golden_texts`: record the golden texts of a report anew."""

from pathlib import Path
from tempfile import TemporaryDirectory

from agent.outputs.report.formats import text
from agent.outputs.report.sections import document_of
from tests.outputs.api.serving import open_api
from tests.outputs.report.reported import figures, filled

GOLDEN = Path(__file__).parent / "golden"
WIDTHS = (80, 200)


def record_texts() -> None:
    """Write a file for each width."""
    with TemporaryDirectory() as folder, open_api(Path(folder)) as api:
        filled(api)
        document = document_of(figures(api))
    for width in WIDTHS:
        (GOLDEN / f"{width}-columns.txt").write_text(text(document, width), encoding="utf-8")


if __name__ == "__main__":
    record_texts()
