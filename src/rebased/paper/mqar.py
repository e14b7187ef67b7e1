"""The runs on the paper's MQAR grids, grouped by how they depart from its protocol, nearest to it first."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from statistics import median
from typing import Any, NamedTuple

from rebased.analysis import compare_all
from rebased.analysis.paired import equals
from rebased.config import plural
from rebased.models.presets import preset_to_change
from rebased.paper.cost import PRESETS, Cost, Speeds, mqar_minutes
from rebased.paper.precision import STATED
from rebased.paper.reference import PAPER, deviations, place_of
from rebased.paper.values import EPOCHS, EXAMPLES, KERNEL_ORDER, RATES, SEEDS, TEST_EXAMPLES, Place
from rebased.paper.verdict import Claim, Number, Protocol, hold_claim, hold_number
from rebased.report.reference_values import ReferenceValue
from rebased.report.synthetic.cells import COUNTED, Cell, Results, build_results
from rebased.report.synthetic.comparisons import mean_by_seed
from rebased.report.tables import Table
from rebased.runs.finished import Run

STOP_ABOVE = 0.99
TASK = {"random_non_queries": False, "alpha": 0.01}
FREE = ("mixers", "vocab_size", "max_len", "backend", "qk_transform", "dt_init")
"""Settings of a model that another check reads, that follow from the task, or that name a kernel of Table 1."""
Pair = tuple[str, Mapping[int, float] | None, Mapping[int, float] | None]
"""A claim, and accuracies by seed of the model that should be ahead and of the other; None if not measured."""


class Group(NamedTuple):
    """Runs on places of one grid that differ from the paper's in the same settings."""

    settings: tuple[str, ...]  # in which they differ, in words
    results: Results
    cells: Mapping[Place, Cell]

    @property
    def departures(self) -> list[str]:
        """All departures: in settings but for those that are only stated, in learning rates and in seeds."""
        cells = list(self.cells.values())
        rates = [len(rates_of(cell)) for cell in cells]
        found = [words for words in self.settings if words != STATED]
        if min(rates) < len(RATES):
            found.append(f"{span(rates)} of the paper's {len(RATES)} learning rates")
        elif any(cell.choice.left_out for cell in cells):
            found.append("not all learning rates with all seeds")
        seeds = [cell.test.n for cell in cells]
        if min(seeds) < SEEDS:
            found.append(f"{seeds_words(seeds)} instead of {SEEDS}")
        return found

    @property
    def stated(self) -> list[str]:
        """Differences from the paper that are stated and are no departure."""
        return [words for words in self.settings if words == STATED]

    @property
    def protocol(self) -> Protocol:
        """Whether it is the paper's protocol."""
        return "departs" if self.departures else "paper"

    @property
    def seeds(self) -> str:
        """'5', or '3 to 5'"""
        return span([cell.test.n for cell in self.cells.values()])

    @property
    def runs(self) -> list[Run]:
        """All runs, at all rates."""
        return [run for cell in self.cells.values() for run in cell.all_runs]


def groups_of(runs: Sequence[Run], wanted: Callable[[Place], bool]) -> list[Group]:
    """The groups of runs on the places that are `wanted`; the first departs least from the paper's protocol."""
    by_settings: dict[tuple[str, ...], list[Run]] = {}
    for run in runs:
        place = place_of(run) if run.status in COUNTED and is_papers_model(run) else None
        if place and wanted(place):
            by_settings.setdefault(tuple(departures_of(run)), []).append(run)
    groups = []
    for settings, alike in by_settings.items():
        results = build_results(alike, PAPER)
        groups.append(Group(settings, results, choose_cells(results)))
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
    """The settings in which a run differs from the paper's, in words; all but STATED are departures."""
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
    task, model = run.settings["task"], run.settings["model"]
    if any(task.get(key) != value for key, value in TASK.items()):
        return False
    if run.model not in (*PRESETS, *KERNEL_ORDER):
        return False
    expected = papers_model(PRESETS.get(run.model, "rebased"), run.d_model)
    if len(model["mixers"]) != len(expected["mixers"]):
        return False
    parts = [(model, expected), *zip(model["mixers"], expected["mixers"], strict=True)]
    return all(same_settings(ours, theirs) for ours, theirs in parts)


def same_settings(ours: Mapping[str, Any], papers: Mapping[str, Any]) -> bool:
    """Whether the settings are equal, but for those that follow from elsewhere."""
    return all(ours.get(key) == value for key, value in papers.items() if key not in FREE)


@cache
def papers_model(preset: str, d_model: int) -> dict[str, Any]:
    """The settings of a preset."""
    settings: dict[str, Any] = preset_to_change(preset, d_model=d_model).model_dump(mode="json")
    return settings


def has_own_start(run: Run) -> bool:
    """Whether a run's Mamba begins otherwise than the paper's, which is handicapped."""
    return any(
        mixer["name"] == "mamba" and mixer.get("dt_init") == "mamba" for mixer in run.settings["model"]["mixers"]
    )


def choose_cells(results: Results) -> dict[Place, Cell]:
    """The cells that are held against the paper, by place. Of two initializations of Mamba a length has one, so that no
    mean over widths mixes them: the paper's if it was run at every width, else Mamba's own."""
    own, papers = cells_by_start(results)
    mixed = {place.seq_len for place in own if place not in papers}
    return own | {place: cell for place, cell in papers.items() if place not in own or place.seq_len not in mixed}


def cells_by_start(results: Results) -> tuple[dict[Place, Cell], dict[Place, Cell]]:
    """The cells of Mamba with its own initialization, and all others, by place."""
    starts: tuple[dict[Place, Cell], dict[Place, Cell]] = ({}, {})
    for cell in results.cells:
        if place := place_of(cell.any_run):
            starts[not has_own_start(cell.any_run)][place] = cell
    return starts


def remark_on_mamba(group: Group) -> list[str]:
    """A remark on Mamba's initialization, where runs have its own, with a test at places that have both."""
    own, papers = cells_by_start(group.results)
    if not own:
        return []
    kept = sorted({place.seq_len for place, cell in own.items() if group.cells[place] is cell})
    where = (
        f"its own initialization at T = {', '.join(f'{n:,}' for n in kept)}" if kept else "the paper's initialization"
    )
    both = [(place, own[place], papers[place]) for place in sorted(own) if place in papers]
    held_out = all(one.held_out and other.held_out for _, one, other in both)
    tests = hold_claims(
        (name_of(place), one.accuracies(held_out), other.accuracies(held_out)) for place, one, other in both
    )
    sentences = [
        f"Mamba has {where} here. In the authors' code a hook sets the bias of Mamba's step size to zero, so that it "
        "forgets within a few tokens (dt_init: paper).",
        *(
            f"At T = {place.seq_len:,}, D = {place.d_model} Mamba recalls {other.test.mean:.3f} with the paper's "
            f"initialization (best of {plural(len(other.runs), 'rate')}) and {one.test.mean:.3f} with its own (best of "
            f"{plural(len(one.runs), 'rate')}); {words_of_test(test)}."
            for (place, one, other), test in zip(both, tests, strict=True)
        ),
    ]
    return [" ".join(sentences)]


def words_of_test(claim: Claim) -> str:
    """'paired t test over 3 seeds, Holm p < 0.001'"""
    if claim.found is None or claim.found.difference.n < 2:
        return "untested: fewer than two seeds are in both"
    return f"paired t test over {claim.found.difference.n} seeds, Holm p {equals(claim.found.t_holm)}"


def rates_of(cell: Cell) -> list[float]:
    """The paper's learning rates that a cell has runs at."""
    return [rate for rate in RATES if rate in cell.runs]


def hold_cells(readings: Mapping[Place, ReferenceValue], group: Group | None) -> list[Number]:
    """The paper's values beside ours."""
    cells = group.cells if group else {}
    return [
        hold_number(name_of(place), reading, cells[place].test if place in cells else None)
        for place, reading in readings.items()
    ]


def name_of(place: Place) -> str:
    """'ReBased, T = 256, D = 24'"""
    return f"{place.model}, T = {place.seq_len:,}, D = {place.d_model}"


def over_widths(group: Group | None, seq_len: int, one: str, other: str) -> Pair:
    """The claim that model `one` recalls more than `other` at one length: the mean over the widths that both have."""
    what = f"T = {seq_len:,}: {one} recalls more than {other}"
    both: list[tuple[Cell, Cell]] = []
    for place, cell in group.cells.items() if group else ():
        twin = group.cells.get(place._replace(model=other)) if group else None
        if place.model == one and place.seq_len == seq_len and twin:
            both.append((cell, twin))
    if not both:
        return what, None, None
    held_out = all(cell.held_out for pair in both for cell in pair)
    ours, theirs = (mean_by_seed([pair[side] for pair in both], held_out) for side in (0, 1))
    widths = ", ".join(str(cell.d_model) for cell, _ in both)
    return f"{what} (D = {widths})", ours, theirs


def hold_claims(pairs: Iterable[Pair]) -> list[Claim]:
    """All claims of a table or figure, tested together: Holm's correction is over those that were measured."""
    every = list(pairs)
    tested = [(one, other) for _, one, other in every if one and other and one.keys() & other.keys()]
    found = iter(compare_all(tested))
    return [
        hold_claim(what, next(found) if one and other and one.keys() & other.keys() else None)
        for what, one, other in every
    ]


def settings_table(group: Group, places: int) -> Table:
    """The paper's protocol beside that of the runs."""
    train, cells = group.runs[0].settings["train"], list(group.cells.values())
    rates = sorted({rate for cell in cells for rate in cell.runs})
    held_out = "; claims are tested on a held-out split" if all(cell.held_out for cell in cells) else ""
    rows = [
        ("epochs", str(EPOCHS), values_of(group, "epochs")),
        ("learning rates", listed(RATES), listed(rates)),
        ("seeds per cell", str(SEEDS), group.seeds),
        ("choice of the rate", "best mean over seeds, on the test split", choice_words(cells)),
        ("choice of the epoch", "best on the test split", f"the same{held_out}"),
        ("sequences per step", "512", values_of(group, "batch_size")),
        ("training / test examples", f"{EXAMPLES:,} / {TEST_EXAMPLES:,}", examples_words(group)),
        ("precision", "fp32", values_of(group, "precision")),
        ("cells", str(places), str(len(cells))),
    ]
    if train.get("give_up"):
        rows.append(("runs ended early", "when solved", "when solved, or by a rule when nothing was learned"))
    return Table(("", "paper", "here"), rows)


def values_of(group: Group, key: str) -> str:
    """The values of a setting of training in all runs."""
    return ", ".join(sorted({str(run.settings["train"].get(key, "?")) for run in group.runs}))


def examples_words(group: Group) -> str:
    """'100,000 / 3,000'"""
    task: dict[str, Any] = group.runs[0].settings["task"]
    return " / ".join(f"{sum(part['examples'] for part in task[split]):,}" for split in ("train", "test"))


def choice_words(cells: Sequence[Cell]) -> str:
    """How the learning rate of the cells was chosen."""
    if all(len(cell.runs) == 1 for cell in cells):
        return "there is one rate"
    if all(not cell.choice.left_out for cell in cells):
        return "best mean over seeds, on the test split"
    return "on the first seeds, then the other seeds of the chosen rate"


def cost_of(speeds: Speeds, places: Iterable[Place], group: Group | None) -> Cost | None:
    """What the cells would cost that are not run by the paper's protocol. None if nothing is left."""
    wanted = list(places)
    left = [place for place in wanted if not (group and group.protocol == "paper" and place in group.cells)]
    if not left:
        return None
    minutes = mqar_minutes(speeds, [(place.model, place.seq_len, place.d_model) for place in left])
    what = "All of it" if len(left) == len(wanted) else f"The {plural(len(left), 'cell')} not run"
    return Cost(minutes, f"{what} by the paper's protocol: {len(RATES) * SEEDS * len(left):,} runs", speeds.records[:2])


def sources(runs: Iterable[Run]) -> list[str]:
    """The names of the files that the runs were read from."""
    return sorted({run.file for run in runs if run.file})


def span(counts: Sequence[int]) -> str:
    """'5', or '3 to 5'"""
    return str(min(counts)) if min(counts) == max(counts) else f"{min(counts)} to {max(counts)}"


def seeds_words(counts: Sequence[int]) -> str:
    """'1 seed', or '3 to 5 seeds'"""
    return f"{span(counts)} seed{'' if max(counts) == 1 else 's'}"


def listed(rates: Iterable[float]) -> str:
    """Learning rates in words: '0.0005, 0.001'."""
    return ", ".join(f"{rate:g}" for rate in rates)
