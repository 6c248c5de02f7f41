"""The recorded pages of the fixed state; run as a module, it writes them anew."""

from pathlib import Path

from tests.outputs.prometheus.filled import OPENMETRICS, TEXT, filled_meter, page_of

_PAGES = Path(__file__).parent / "pages"

GOLDEN = {TEXT: _PAGES / "page.txt", OPENMETRICS: _PAGES / "page.openmetrics.txt"}

if __name__ == "__main__":
    _PAGES.mkdir(exist_ok=True)
    for accept, path in GOLDEN.items():
        path.write_text(page_of(filled_meter(), accept))
