"""Tables of language models: perplexity over seeds and by distance, differences paired by seed, settings, all runs."""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from math import isnan
from statistics import fmean, median

from rebased.analysis.spread import describe, student_interval
from rebased.report.comparisons import BRIEF, PAIRS, TESTS, Difference, pair_cells, result_cells
from rebased.report.lm.models import PARTS, SPLITS, LanguageModels, measured, steps
from rebased.report.reference_values import Measure
from rebased.report.tables import NONE, Number, Table, number, plus_minus
from rebased.runs.finished import Run
from rebased.runs.run_names import flatten

PERPLEXITIES: tuple[Measure, ...] = ("all", "ar", "non_ar")
Cell = Callable[[Sequence[float]], str]
"""Shows the values of all seeds."""


def with_interval(values: Sequence[float], sign: str = "") -> str:
    """The mean ± half of its 95 % interval (Student's t), which fewer than three values do not have."""
    middle = fmean(values)
    half = student_interval(values)[1] - middle
    if isnan(half):
        return number(middle, f"{sign}.3f")
    return Number(f"{middle:{sign}.3f} ± {half:.3f}", middle, {"half of the 95% interval": half})


def with_sd(values: Sequence[float]) -> str:
    """The mean ± the sample standard deviation, which one value alone does not have."""
    return plus_minus(describe(values))


def reference_heading(found: LanguageModels) -> tuple[str, ...]:
    """The heading of the column of reference values: 'paper: all / AR / non-AR'; none if there are no such values."""
    return (f"{found.known.name}: {' / '.join(PARTS.values())}",) if found.known.name else ()


def difference_table(found: LanguageModels) -> Table:
    """One row per pair of models: the mean difference over the seeds that both have, ± half of its 95 % interval."""
    rows = []
    for b, a in combinations(found.models, 2):
        seeds = sorted(found.models[a].keys() & found.models[b].keys())
        if not seeds:
            continue
        ours, theirs = ({part: found.values(model, part) for part in PARTS} for model in (a, b))
        cells = [with_interval([ours[part][seed] - theirs[part][seed] for seed in seeds], "+") for part in PARTS]
        known = [x - y for x, y in zip(reference_of(a, found), reference_of(b, found), strict=False)]
        rows.append((f"{a} - {b}", number(len(seeds), "d"), *cells, *reference_cell(known, found, "+")))
    return Table(("difference", "seeds", *PARTS.values(), *reference_heading(found)), rows)


def distance_table(found: LanguageModels, cell: Cell) -> Table | None:
    """One row per distance, one column per model: perplexity of AR tokens, where `cell` shows the values of all seeds.
    None if no record has it."""
    models = found.by_distance
    rows = []
    for distance in sorted({distance for values in models.values() for distance in values}):
        name = Number(str(distance), None, {"nearest": distance.nearest, "farthest": distance.farthest})
        cells = [cell(values[distance]) if distance in values else NONE for values in models.values()]
        rows.append((name, number(distance.tokens, ","), *cells))
    return Table(("AR tokens", "number", *models), rows) if rows else None


def task_table(found: LanguageModels, scores: Mapping[str, Mapping[str, float]]) -> Table | None:
    """One row per task and metric: the mean over seeds ± half of its 95 % interval, one column per model. None without
    scores. `scores` are those of each run, by its digest (runs/evaluations.py)."""
    own = {model: [scores.get(run.digest, {}) for run in runs.values()] for model, runs in found.models.items()}
    tasks = sorted({task for several in own.values() for each in several for task in each})
    rows = []
    for task in tasks:
        values = [[each[task] for each in several if task in each] for several in own.values()]
        rows.append((task, *(with_interval(some) if some else NONE for some in values)))
    return Table(("task", *own), rows) if rows else None


def perplexity_table(found: LanguageModels, cell: Cell = with_sd, *, always: bool = False) -> Table:
    """One row per model: perplexity, where `cell` shows the values of all seeds. Reference values are in the last
    column, if some model has them or `always`."""
    known = always or any(reference_of(model, found) for model in found.models)
    rows = []
    for model, by_seed in found.models.items():
        runs = list(by_seed.values())
        cells = [cell(list(found.values(model, part).values())) for part in PARTS]
        theirs = reference_cell(reference_of(model, found), found) if known else ()
        place = (model, number(runs[0].parameters, ","), number(len(runs), "d"))
        rows.append((*place, *cells, number(speed(runs), ",.0f"), *theirs))
    head = ("model", "parameters", "seeds", *PARTS.values(), "tokens/s")
    return Table((*head, *reference_heading(found)) if known else head, rows, head[:-1])


def comparison_table(differences: Sequence[Difference]) -> Table:
    """One row per comparison: the paired difference and the tests."""
    place = ("comparison", "tokens")
    rows = [
        (f"{one.reference} − {one.other}", PARTS[one.part], *result_cells(one, "+.3f"), *pair_cells(one))
        for one in differences
    ]
    return Table((*place, *TESTS, *PAIRS), rows, (*place, *BRIEF))


def settings_table(found: LanguageModels, *, differing: bool) -> Table:
    """One row per setting, one column per model. `differing` selects the settings in which the models differ, or
    those that all of them share."""
    columns = {model: _settings(list(runs.values())) for model, runs in found.models.items()}
    rows = []
    for path in dict.fromkeys(path for column in columns.values() for path in column):
        values = [column.get(path, NONE) for column in columns.values()]
        if differing == (len(set(values)) > 1):
            rows.append((path, *(values if differing else values[:1])))
    return Table(("setting", *columns) if differing else ("setting", "value"), rows)


def _settings(runs: Sequence[Run]) -> dict[str, str]:
    """By path, the value in all runs of one model; several values are listed."""
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        for path, leaf in flatten(run.settings).items():
            values.setdefault(path, {})["none" if leaf is None else str(leaf)] = None
    return {path: ", ".join(several) for path, several in values.items() if path != "train.seed"}


def runs_table(runs: Sequence[Run], names: dict[str, str]) -> Table:
    """One row per run, also of those that are in no result; `names` has the model's name by digest."""
    head = (
        *("run", "model", "seed", "split", *PARTS.values(), "steps", "tokens", "tokens/s"),
        *("status", "code", "device", "processes"),
    )
    brief = ("run", "model", "seed", *PARTS.values(), "steps")
    rows = []
    for run in runs:
        split = next((split for split in SPLITS if measured(run, split)), NONE)
        found, lines = measured(run, split), steps(run)
        rows.append(
            (
                *(run.digest, names.get(run.digest, run.model), number(run.seed, "d"), split),
                *(number(found[part]["perplexity"] if found else None) for part in PARTS),
                number(lines[-1]["step"] if lines else 0, "d"),
                number(lines[-1]["tokens"] if lines else 0, ","),
                number(speed([run]) if lines else None, ",.0f"),
                *(run.status, run.code, run.device, number(run.lines[0].get("processes", 1), "d")),
            )
        )
    return Table(head, rows, brief)


def speed(runs: Sequence[Run]) -> float:
    """Tokens per second: the median over the recorded steps of all runs."""
    return median(line["tokens_per_second"] for run in runs for line in steps(run))


def reference_of(model: str, found: LanguageModels) -> list[float]:
    """The reported perplexities of all, AR and non-AR tokens; empty unless all three are known."""
    values = found.reference(model).values
    return [values[part].mean for part in PERPLEXITIES] if set(PERPLEXITIES) <= values.keys() else []


def reference_cell(values: Sequence[float], found: LanguageModels, sign: str = "") -> tuple[str, ...]:
    """The cell '16.45 / 3.67 / 56.31', or '-' where there are none. It says so if the values are of another tokenizer
    than these models'. No cell if there are no reference values at all."""
    if not values or not found.known.name:
        return ("-",) if found.known.name else ()
    other = next((limit for run in found.runs if (limit := found.known.of(run).limit)), None)
    text = " / ".join(f"{value:{sign}.2f}" for value in values) + (f" ({other})" if other else "")
    parts: dict[str, float | str | None] = dict(zip(PARTS.values(), values, strict=True))
    return (Number(text, None, parts | {"tokenizer": other}),)


def compare_tables(found: LanguageModels, scores: Mapping[str, Mapping[str, float]] | None = None) -> dict[str, Table]:
    """The tables of `rebased lm compare` by name: perplexity by model, the differences if there are several models, AR
    tokens by distance if records have them, and scores on tasks if there are some, by digest and task."""
    tables = {
        "models": perplexity_table(found, with_interval, always=True),
        "differences": difference_table(found) if len(found.models) > 1 else None,
        "by_distance": distance_table(found, with_interval),
        "tasks": task_table(found, scores or {}),
    }
    return {name: table for name, table in tables.items() if table}


def as_markdown(tables: Mapping[str, Table], sentences: Sequence[str]) -> str:
    """Tables with sentences below them as Markdown."""
    lines = "".join(f"- {sentence}\n" for sentence in sentences)
    return "\n".join([*(table.to_markdown() for table in tables.values()), lines])
