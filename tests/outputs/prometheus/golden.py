"""The recorded expositions of the fixed state; run as a module, it rewrites them."""

from pathlib import Path

from tests.outputs.prometheus.filled import OPENMETRICS, TEXT, exposition_of, filled_meter

_RECORDED = Path(__file__).parent / "recorded"

GOLDEN = {TEXT: _RECORDED / "exposition.txt", OPENMETRICS: _RECORDED / "exposition.openmetrics.txt"}

if __name__ == "__main__":
    _RECORDED.mkdir(exist_ok=True)
    for accept, path in GOLDEN.items():
        path.write_text(exposition_of(filled_meter(), accept))
