"""The contract of every mixer (rebased.evaluate.mixer_contract): all that the package registers, or `--mixer NAME`.

A check raises if it fails; tests/evaluate/test_mixer_contract.py shows that with wrong mixers.
"""

import pytest

from mixer_option import MIXER
from rebased.evaluate.checks import NotApplicable
from rebased.evaluate.mixer_checks import CHECKS, Check
from rebased.mixers import mixer_class, mixer_names


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        ours = [name for name in mixer_names() if mixer_class(name).__module__.startswith("rebased.")]
        chosen = metafunc.config.stash.get(MIXER, None)
        metafunc.parametrize("name", [chosen] if chosen else ours)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
def test_contract(name: str, check: Check) -> None:
    try:
        check.run(name)
    except NotApplicable as reason:
        pytest.skip(str(reason))
