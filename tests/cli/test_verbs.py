"""The table of commands: verbs of one word and of two, imported when called, near misses named."""

import subprocess
import sys

import pytest

import rebased.cli
from rebased.cli import COMMANDS, GROUPS, main


@pytest.fixture(autouse=True)
def _two_word_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "params": COMMANDS["params"],
        "zoo feed": ("test_verbs:feed", "Feed one animal."),
        "zoo close": ("no.such.module:close", "Close the gates."),
    }
    monkeypatch.setattr(rebased.cli, "COMMANDS", table)
    monkeypatch.setattr(rebased.cli, "GROUPS", {"zoo": "All about animals."})


def feed(animal: str, *, grams: int = 10) -> int:
    print(f"{animal} eats {grams} g")
    return 3


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def test_every_group_has_verbs_and_every_two_word_verb_a_group() -> None:
    assert {verb.split()[0] for verb in COMMANDS if " " in verb} == set(GROUPS)


def test_a_verb_of_two_words_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("zoo", "feed", "bear", "--grams", "500") == 3
    assert capsys.readouterr().out == "bear eats 500 g\n"


@pytest.mark.parametrize("words", [("zoo",), ("zoo", "--help")])
def test_the_first_word_alone_lists_the_verbs(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert run(*words) == 0  # though zoo close cannot be imported
    text = capsys.readouterr().out
    assert "Feed one animal." in text
    assert "Close the gates." in text


def test_help_lists_the_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    assert "All about animals." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("zoo", "fed"), "unknown command 'zoo fed'; did you mean 'feed'?"),
        (("zoo", "xylophone"), "unknown command 'zoo xylophone'; known: feed, close"),
        (("feeds",), "unknown command 'feeds'; did you mean 'zoo feed'?"),
        (("zooo",), "unknown command 'zooo'; did you mean 'zoo'?"),
    ],
)
def test_an_unknown_verb_is_named(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str) -> None:
    assert run(*words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}")
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""


def lion() -> None:
    try:
        import no_such_lion  # noqa: F401
    except ImportError as error:
        raise ImportError("lions need meat: pip install meat") from error


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("test_verbs:lion", "lions need meat: pip install meat"),
        ("no.such.module:close", "No module named 'no'"),
    ],
)
def test_what_is_not_installed_is_told_with_its_remedy(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, function: str, message: str
) -> None:
    monkeypatch.setitem(rebased.cli.COMMANDS, "zoo close", (function, "Close the gates."))
    assert run("zoo", "close") == 2
    assert capsys.readouterr().err == f"error: {message}\n"


def test_the_first_word_of_each_group_answers_without_torch() -> None:
    for word in GROUPS:
        script = f"import sys; sys.argv[1:] = ['{word}']; import atexit; from rebased.cli import main\n"
        script += "atexit.register(lambda: print('torch' in sys.modules)); main()"
        answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert answer.stdout.endswith("False\n"), answer.stdout
