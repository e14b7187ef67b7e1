"""The table of commands: verbs of one word and of two, imported when called, near misses named."""

import dataclasses
import importlib
import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated, get_type_hints

import pytest
from cyclopts import Parameter
from cyclopts.completion.detect import ShellDetectionError

import rebased.cli
from rebased.cli import COMMANDS, EXAMPLES, GROUPS, json_target, main
from rebased.cli.lists import first_sentence
from rebased.cli.output import TO_TERMINAL
from rebased.mixers import mixer_class, mixer_names


@pytest.fixture(autouse=True)
def _two_word_verbs(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {
        "paper": COMMANDS["paper"],
        "zoo feed": ("test_verbs:feed", "Feed one animal."),
        "zoo wash": ("test_verbs:wash", "Wash one animal."),
        "zoo close": ("no.such.module:close", "Close the gates."),
    }
    monkeypatch.setattr(rebased.cli, "COMMANDS", table)
    monkeypatch.setattr(rebased.cli, "EXAMPLES", {"zoo feed": "bear --grams 500"})
    monkeypatch.setattr(rebased.cli, "GROUPS", {"zoo": "All about animals."})


def feed(animal: str, *, grams: int = 10) -> int:
    """Feed one animal of the zoo.

    It eats at once.
    """
    print(f"{animal} eats {grams} g")
    return 3


def wash(*words: Annotated[str, Parameter(allow_leading_hyphen=True)], with_: str) -> None:
    print(words, with_)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as left:
        main(words)
    return int(left.value.code or 0)


def test_every_group_has_verbs_and_every_two_word_verb_a_group() -> None:
    assert {verb.split()[0] for verb in COMMANDS if " " in verb} == set(GROUPS)


def test_the_help_of_a_verb_is_its_whole_docstring(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("zoo", "feed", "--help") == 0
    assert "It eats at once." in capsys.readouterr().out
    assert run("zoo", "--help") == 0
    shown = capsys.readouterr().out
    assert "Feed one animal." in shown
    assert "It eats at once." not in shown


def test_every_verb_that_cannot_stand_alone_has_an_example() -> None:
    verbs = {verb: function.split(":") for verb, (function, _) in COMMANDS.items()}
    signatures = {
        verb: inspect.signature(getattr(importlib.import_module(module), name))
        for verb, (module, name) in verbs.items()
    }
    needy = {
        verb
        for verb, signature in signatures.items()
        if any(
            each.default is each.empty and each.kind is not each.VAR_POSITIONAL
            for each in signature.parameters.values()
        )
    }
    assert set(EXAMPLES) == needy


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
        (("zoo", "xylophone"), "unknown command 'zoo xylophone'; known: feed, wash, close"),
        (("feeds",), "unknown command 'feeds'; did you mean 'zoo feed'?"),
        (("zooo",), "unknown command 'zooo'; did you mean 'zoo'?"),
        (("close",), "unknown command 'close'; did you mean 'zoo close'?"),
        (("xylophone",), "unknown command 'xylophone'; known: paper, zoo\n"),
        (("zoo", "feed"), "rebased zoo feed needs ANIMAL; for example: rebased zoo feed bear --grams 500\n"),
        (("zoo", "feed", "bear", "--grams"), "--grams needs a value\n"),
        (("zoo", "wash", "--whit", "soap"), "unknown option '--whit'; did you mean '--with'?"),
        (("zoo", "wash", "bear"), "rebased zoo wash needs --with\n"),
        (("zoo", "feed", "bear", "--often"), "Unknown option: --often. Options are listed by: rebased zoo feed -"),
        (("zoo", "feed", "bear", "--gram", "5"), "Unknown option: --gram. Did you mean --grams?\n"),
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


def test_help_and_lists_answer_without_torch() -> None:
    for words in (["list"], ["lm"], ["data"], ["--help"], ["--version"], ["list", "configs"]):
        script = f"import sys; sys.argv[1:] = {words}; import atexit; from rebased.cli import main\n"
        script += "atexit.register(lambda: print('torch' in sys.modules, 'pydantic' in sys.modules)); main()"
        answer = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        expected = "False False\n" if words[0].startswith("--") else "False"
        assert expected in answer.stdout.splitlines(keepends=True)[-1], answer.stdout


def test_python_m_rebased_is_the_command() -> None:
    answer = subprocess.run([sys.executable, "-m", "rebased", "--version"], capture_output=True, text=True, check=True)
    assert answer.stdout == f"{rebased.__version__}\n"
    wrong = subprocess.run([sys.executable, "-m", "rebased", "trian"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: unknown command 'trian'; did you mean 'train'?\n"


def test_completion_is_installed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(rebased.cli, "COMMANDS", {"paper": COMMANDS["paper"], "zoo feed": ("test_verbs:feed", "Feed.")})
    script = tmp_path / "rebased.bash"
    assert run("--install-completion", "--shell", "bash", "--output", str(script)) == 0
    assert capsys.readouterr().out == f"wrote {script}; load it with: source {script}\n"
    asked = f"source {script}; COMP_WORDS=(rebased zoo feed --); COMP_CWORD=3; _rebased; printf '%s ' ${{COMPREPLY[@]}}"
    answer = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert "--grams" in answer.stdout.split()


def test_a_shell_that_cannot_be_told_is_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_shell() -> str:
        raise ShellDetectionError

    monkeypatch.setattr("cyclopts.completion.detect.detect_shell", no_shell)
    assert run("--install-completion") == 2
    assert capsys.readouterr().err == "error: cannot tell which shell this is; name it, for example --shell bash\n"


@pytest.mark.parametrize(
    ("words", "understood"),
    [
        (["report", "--json", "runs"], ["report", "--json=-", "runs"]),
        (["report", "runs", "--json"], ["report", "runs", "--json=-"]),
        (
            ["report", "runs", "--json", "out.json", "-o", "p.html"],
            ["report", "runs", "--json=out.json", "-o", "p.html"],
        ),
        (["paper", "--json", "--quiet"], ["paper", "--json=-", "--quiet"]),
        (["paper", "--json=numbers"], ["paper", "--json=numbers"]),
    ],
)
def test_json_has_a_file_or_is_printed(words: list[str], understood: list[str]) -> None:
    assert json_target(words) == understood


SHIPPED_MIXERS = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
ALL_COMMANDS = dict(COMMANDS)


def test_every_command_takes_json_and_quiet() -> None:
    for verb, (function, _) in ALL_COMMANDS.items():
        module, _, name = function.partition(":")
        parameters = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        assert parameters["to"].default == TO_TERMINAL, verb


@pytest.mark.parametrize("what", ["mixers", "tasks", "presets", "configs"])
def test_lists_say_every_name_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    monkeypatch.setattr(rebased.cli, "COMMANDS", ALL_COMMANDS)
    monkeypatch.setattr(rebased.cli, "GROUPS", dict.fromkeys(GROUPS, ""))
    monkeypatch.setenv("COLUMNS", "40")
    assert run("list", what, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    registered = {*SHIPPED_MIXERS} if what == "mixers" else {one["name"] for one in found}  # tests register others
    assert all(one["about"].rstrip(".?") for one in found if one["name"] in registered)
    assert run("list", what) == 0
    printed = capsys.readouterr().out
    assert [one["name"] for one in found if one["name"] not in printed] == []
    assert run("list", what, "--quiet") == 0
    assert capsys.readouterr().out == ""


def test_a_product_ends_no_sentence() -> None:
    assert first_sentence("Similarity (q . k)^2\n of both. And more.") == "Similarity (q . k)^2 of both."


def test_what_is_written_is_named_by_one_option() -> None:
    """-o is short for --out in every command that has one of both, and there is no other spelling."""
    named = {}
    for verb, (function, _) in COMMANDS.items():
        module, _, attribute = function.partition(":")
        hints = get_type_hints(getattr(importlib.import_module(module), attribute), include_extras=True)
        for options in [hint for hint in hints.values() if dataclasses.is_dataclass(hint)]:
            hints |= get_type_hints(options, include_extras=True)
        for hint in hints.values():
            for parameter in getattr(hint, "__metadata__", ()):
                names = set(getattr(parameter, "name", None) or ())
                if names & {"-o", "--out", "--output"}:
                    named[verb] = names
        assert ("out" in hints) == (verb in named), verb
        assert "output" not in hints, verb
    assert set(named) >= {"train", "sweep", "demo", "report", "paper", "probe", "lm train", "lm export", "data prepare"}
    assert all(names == {"--out", "-o"} for names in named.values())
