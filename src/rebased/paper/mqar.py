"""The runs on the paper's MQAR grids, grouped by how they depart from its protocol, nearest to it first."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from rebased.analysis.unpaired import Effect, effect_of
from rebased.models import LMConfig
from rebased.models.presets import preset_to_change
from rebased.paper.finding import Finding
from rebased.paper.precision import TF32, PrecisionTest
from rebased.paper.reference import PAPER, deviations, has_own_start, place_of
from rebased.paper.values import KERNEL_ORDER, PRESETS, RATES, READINGS, SEEDS, Place
from rebased.paper.verdict import Claim, Contest, Number, Protocol, hold_number
from rebased.report.reference_values import ReferenceValue, agreement
from rebased.report.synthetic.cells import COUNTED, Cell, Results, build_results, has_learned
from rebased.report.synthetic.comparisons import mean_by_seed
from rebased.report.tables import NONE
from rebased.runs.finished import Run

STOP_ABOVE = 0.99
CEILING = 0.97  # here all models that have solved the task agree with each other
TASK = {"random_non_queries": False, "alpha": 0.01}
FREE = ("mixers", "vocab_size", "max_len", "backend", "qk_transform", "dt_init")
"""Settings of a model that another check reads, that follow from the task, or that name a kernel of Table 1."""


class Group(NamedTuple):
    """Runs on places of one grid that differ from the paper's in the same settings."""

    settings: tuple[str, ...]  # in which they differ, in words
    results: Results
    cells: Mapping[Place, Cell]
    precision: PrecisionTest | None = None  # whether TF32 is a departure; without it, it is

    @property
    def departures(self) -> list[str]:
        """In settings, in learning rates and in seeds."""
        cells = list(self.cells.values())
        if not cells:
            return []
        rates = [len(rates_of(cell)) for cell in cells]
        equal = TF32 if self.precision and self.precision.is_equivalent else ""
        found = [words for words in self.settings if words != equal]
        if min(rates) < len(RATES):
            found.append(f"{span(rates)} of the paper's {len(RATES)} learning rates")
        elif any(cell.choice.left_out for cell in cells):
            found.append("not all learning rates with all seeds")
        seeds = [cell.test.n for cell in cells]
        if min(seeds) < SEEDS:
            found.append(f"{span(seeds)} seed{'' if max(seeds) == 1 else 's'} instead of {SEEDS}")
        return found

    @property
    def protocol(self) -> Protocol:
        """Whether it is the paper's protocol."""
        return "departs" if self.departures else "paper" if self.cells else "none"

    @property
    def runs(self) -> list[Run]:
        """The runs of all cells."""
        return [run for cell in self.cells.values() for run in cell.all_runs]


NO_RUNS = Group((), Results((), 0), {})


def finding(name: str, group: Group, numbers: Sequence[Number], claims: Sequence[Claim], **more: Any) -> Finding:
    """What these runs show of a table or figure. `more` are other fields of the finding."""
    found = sources(group.runs)
    return Finding(name, group.protocol, numbers, claims, group.departures, unit="cell", sources=found, **more)


def groups_of(
    runs: Sequence[Run], wanted: Callable[[Place], bool], precision: PrecisionTest | None = None
) -> list[Group]:
    """The runs on the `wanted` places, grouped by their departures from the paper's protocol, fewest first. Runs of
    Mamba with its own initialization are another experiment and are left out."""
    by_settings: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        place = place_of(run) if run.status in COUNTED and is_papers_model(run) and not has_own_start(run) else None
        if place and wanted(place):
            by_settings.setdefault(tuple(departures_of(run)), []).append(run)
    groups = []
    for settings, alike in by_settings.items():
        results = build_results(alike, PAPER)
        cells = {place: cell for cell in results.cells if (place := place_of(cell.any_run))}
        groups.append(Group(settings, results, cells, precision))
    return sorted(groups, key=rank)


def rank(group: Group) -> tuple[bool, int, int, int, int]:
    """A sort key: how far a group departs from the paper's protocol. A group that mostly has one seed per cell comes
    last: it can be put to no test. Another precision departs least: a few runs in fp32 do not stand in the way of a
    whole table in TF32."""
    alone = median(cell.test.n for cell in group.cells.values()) < 2
    severe = sum(not words.startswith("precision") for words in group.settings)
    epochs = max((n for run in group.runs if isinstance(n := run.settings["train"].get("epochs"), int)), default=0)
    return alone, severe, -epochs, -len(group.cells), len(group.settings)


def departures_of(run: Run) -> list[str]:
    """The settings in which a run differs from the paper's, in words."""
    found, train, task = deviations(run), run.settings["train"], run.settings["task"]
    if train["give_up"] is not None:
        found.append("runs that learned nothing early were ended")
    if train["stop_above"] != STOP_ABOVE:
        found.append(f"runs end at accuracy {train['stop_above']} instead of {STOP_ABOVE}")
    if task["seeds"] != "shared":
        found.append("data drawn anew for every seed")
    return found


def is_papers_model(run: Run) -> bool:
    """Whether a run's model and task are the paper's, and not ones with other heads, norms, similarities or fillers."""
    task = run.settings["task"]
    if any(task.get(key) != value for key, value in TASK.items()):
        return False
    if run.model not in (*PRESETS, *KERNEL_ORDER):
        return False
    try:  # with the settings that are newer than the record
        model = LMConfig.model_validate(run.settings["model"]).model_dump(mode="json")
    except ValueError:
        return False
    expected = papers_model(PRESETS.get(run.model, "rebased"), run.d_model)
    if len(model["mixers"]) != len(expected["mixers"]):
        return False
    parts = [(model, expected), *zip(model["mixers"], expected["mixers"], strict=True)]
    return all(ours.get(key) == theirs[key] for ours, theirs in parts for key in theirs if key not in FREE)


@cache
def papers_model(preset: str, d_model: int) -> dict[str, Any]:
    """The section model of a preset at this width."""
    settings: dict[str, Any] = preset_to_change(preset, d_model=d_model).model_dump(mode="json")
    return settings


def rates_of(cell: Cell) -> list[float]:
    """The paper's learning rates that a cell has runs at."""
    return [rate for rate in RATES if rate in cell.runs]


def hold_cells(readings: Mapping[Place, ReferenceValue], group: Group) -> list[Number]:
    """The paper's values beside ours."""
    numbers = []
    for place, reading in readings.items():
        ours = group.cells[place].test if place in group.cells else None
        number = hold_number(f"{place.model}, T = {place.seq_len:,}, D = {place.d_model}", reading, ours)
        failed = ours is not None and not have_learned([group.cells[place]])
        numbers.append(number._replace(outcome="did not learn") if failed else number)
    return numbers


def wrong_rows(readings: Mapping[Place, ReferenceValue], group: Group) -> Iterator[str]:
    """What an agreement is worth: how often cells agree with the paper's value of another model, at the same place."""
    cells = {place: cell.test for place, cell in group.cells.items() if cell.test.n > 1 and have_learned([cell])}
    pairs = [(place, other) for place in cells for other in readings if other[1:] == place[1:]]
    found = {pair: agreement(cells[pair[0]], readings[pair[1]]) for pair in pairs}
    wrong = [answer for (place, other), answer in found.items() if other != place]
    right = [readings[place].mean for (place, other), answer in found.items() if other == place and answer == "agrees"]
    if wrong and right:
        yield (
            f"What an agreement is worth: of {len(wrong)} comparisons with another model's value at the same place "
            f"{wrong.count('agrees')} agree too and {wrong.count('differs')} differ; of the {len(right)} that agree "
            f"{sum(mean >= CEILING for mean in right)} are at the ceiling ({CEILING:g} or more)."
        )


def over_widths(group: Group, seq_len: int, one: str, other: str) -> Contest:
    """The claim that model `one` recalls more than `other` at one length: the mean over the widths that both have, and
    where both learned, if there are such."""
    what = f"T = {seq_len:,}: {one} recalls more than {other}"
    both = {
        place: (cell, group.cells[twin])
        for place, cell in group.cells.items()
        if (place.model, place.seq_len) == (one, seq_len) and (twin := place._replace(model=other)) in group.cells
    }
    if not both:
        return Contest(what, pair=(one, other))
    learned = {place: cells for place, cells in both.items() if have_learned(cells)}
    both = learned or both
    sides = list(zip(*both.values(), strict=True))
    cells = [cell for side in sides for cell in side]
    held_out = all(cell.held_out for cell in cells)
    ours, theirs = (mean_by_seed(side, held_out) for side in sides)
    widths = [place.d_model for place in both]
    about = {"paper": papers_effect(list(both), other), "pair": (one, other), "learned": bool(learned)}
    where = f"{what} (D = {', '.join(map(str, widths))})"
    return Contest(where, ours, theirs, widths=widths, **about)  # type: ignore[arg-type]


def have_learned(cells: Iterable[Cell]) -> bool:
    """True if some run of each cell learned, at whatever rate."""
    return all(any(map(has_learned, cell.all_runs)) for cell in cells)


def papers_effect(places: Sequence[Place], other: str) -> Effect | None:
    """The paper's difference, as the mean over places; None if a value was not read, or is only a bound."""
    found = []
    for place in places:
        one, two = READINGS.get(place), READINGS.get(place._replace(model=other))
        if one is None or two is None or one.at_least or two.at_least:
            return None
        found.append(effect_of(one.mean, one.sd or 0.0, one.seeds, two.mean, two.sd or 0.0, two.seeds))
    error = sum(each.error**2 for each in found) ** 0.5 / len(found)
    freedom = min(each.freedom for each in found)
    return Effect(sum(each.difference for each in found) / len(found), error, freedom, SEEDS, SEEDS)


def sources(runs: Iterable[Run]) -> list[str]:
    """The names of the files that the runs were read from."""
    return sorted({run.file for run in runs if run.file})


def span(counts: Sequence[float]) -> str:
    """'5', or '3 to 5'; a dash if there is none."""
    ends = sorted({min(counts), max(counts)} if counts else ())
    return " to ".join(map(str, ends)) or NONE
