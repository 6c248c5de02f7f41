"""What the commands print is what was read and found good, and fits the terminal."""

import pytest

from tests.command_texts.golden import FOLDER, WIDTH, texts


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    return texts()


def test_the_texts_are_as_they_were(printed: dict[str, str]) -> None:
    kept = {path.name: path.read_text("utf-8") for path in FOLDER.glob("*.txt")}
    assert printed == kept


# They serve until they are stopped, or hold commands.
WITHOUT_RESULT = {
    "help",
    "help-run",
    "help-demo",
    "help-serve",
    "help-config",
    "help-db",
    "help-objectives",
}


def test_every_command_that_prints_a_result_prints_it_as_json(printed: dict[str, str]) -> None:
    helps = {name: text for name, text in printed.items() if name.startswith("help")}
    without = {name.removesuffix(".txt") for name, text in helps.items() if "--json" not in text}
    assert without == WITHOUT_RESULT


def test_no_line_of_help_is_wider_than_the_terminal_or_cut(printed: dict[str, str]) -> None:
    for name, text in printed.items():
        if name.startswith("help"):
            assert max(len(line) for line in text.splitlines()) <= WIDTH, name
            assert "…" not in text, name
