"""Language models over seeds beside the paper's Table 2: perplexity of all, AR and non-AR tokens, and differences."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import isfinite, isnan
from statistics import fmean, median
from typing import Any

from rebased.analysis.intervals import t_interval
from rebased.report.tables import Table
from rebased.runs.finished import Run
from rebased.runs.lm_config import TextRunConfig
from rebased.runs.run_names import ModelName, flatten, kind_of, tell_apart

PARTS = {"all": "all", "ar": "AR", "non_ar": "non-AR"}  # as records and as tables call them
TABLE_2 = {"Attention": (16.62, 3.57, 58.57), "Based": (16.69, 3.72, 57.21), "ReBased": (16.45, 3.67, 56.31)}

# Settings that name no model: which of several alike it is, how it was computed, how often something was told.
UNTOLD = (
    "train.seed",
    *TextRunConfig.how,
    "train.log_every",
    "train.eval_every",
    "train.eval_windows",
    "train.final_windows",
    "train.checkpoint_every",
)


@dataclass(frozen=True)
class LanguageModels:
    """Runs that are done, measured on one split of one text in the same windows."""

    split: str
    models: dict[str, dict[int, Run]]  # by name, then by seed
    left_out: list[str]  # folders of runs that are not done, or repeat another's seed

    def values(self, model: str, part: str) -> dict[int, float]:
        return {seed: measured(run, self.split)[part]["perplexity"] for seed, run in self.models[model].items()}

    def levels(self) -> Table:
        """A row a model: means over its seeds."""
        head = ("model", "parameters", "seeds", *PARTS.values(), "tokens/s", "paper: all / AR / non-AR")
        rows = []
        for model, runs in self.models.items():
            cells = [with_interval(list(self.values(model, part).values()), "") for part in PARTS]
            parameters = f"{next(iter(runs.values())).parameters:,}"
            speed = median(line["tokens_per_second"] for run in runs.values() for line in steps(run))
            paper = " / ".join(f"{value:.2f}" for value in TABLE_2.get(model, ())) or "-"
            rows.append((model, parameters, str(len(runs)), *cells, f"{speed:,.0f}", paper))
        return Table(head, rows)

    def differences(self) -> Table:
        """A row a pair of models: the mean difference over the seeds that both have."""
        rows = []
        for b, a in combinations(self.models, 2):
            seeds = sorted(self.models[a].keys() & self.models[b].keys())
            if not seeds:
                continue
            ours, theirs = ({part: self.values(model, part) for part in PARTS} for model in (a, b))
            cells = [with_interval([ours[part][seed] - theirs[part][seed] for seed in seeds], "+") for part in PARTS]
            paper = [f"{x - y:+.2f}" for x, y in zip(TABLE_2.get(a, ()), TABLE_2.get(b, ()), strict=False)]
            rows.append((f"{a} - {b}", str(len(seeds)), *cells, " / ".join(paper) or "-"))
        return Table(("difference", "seeds", *PARTS.values(), "paper: all / AR / non-AR"), rows)

    def remarks(self) -> list[str]:
        """What one has to know to read the tables."""
        run = next(iter(next(iter(self.models.values())).values()))
        everything = [each for runs in self.models.values() for each in runs.values()]
        corpus, found, data = run.lines[0]["corpus"], measured(run, self.split), run.settings["data"]
        apart = "" if data["isolate_documents"] else "not "
        tokens = {steps(each)[-1]["tokens"] for each in everything}
        said = [
            f"Perplexity on split {self.split}: {found['tokens']:,} tokens of {corpus['tokenizer']} in windows of "
            f"{data['seq_len']:,}, documents {apart}kept apart; {found['ar_share']:.3f} of them are AR. Trained on "
            f"{' or '.join(f'{number:,}' for number in sorted(tokens))} tokens.",
            "± is half of a 95 % interval of the mean over seeds (Student's t), not corrected for the number of "
            "intervals. Differences are of the same seeds, so of the same tokens in the same order; where 0 is within "
            "±, these seeds do not tell which model is better.",
            "The paper's models have 127 to 157 million parameters, its text is the Pile, and it shows no spread: "
            "signs and ratios can be compared, levels cannot.",
        ]
        differ = [f"{key} {' and '.join(values)}" for key, values in trained_apart(everything).items()]
        if differ:
            said.append(f"Not all were trained alike: {', '.join(differ)}.")
        if self.left_out:
            said.append(f"Left out, not done or there twice: {', '.join(self.left_out)}.")
        versions = list(dict.fromkeys(f"{each.code} on {each.device}" for each in everything))
        return [*said, f"Code: {'; '.join(versions)}."]

    def tables(self) -> list[Table]:
        return [self.levels(), self.differences()] if len(self.models) > 1 else [self.levels()]

    def to_markdown(self) -> str:
        tables = [table.to_markdown() for table in self.tables()]
        return "\n".join([*tables, "".join(f"- {remark}\n" for remark in self.remarks())])


def compare_language_models(runs: Sequence[Run]) -> LanguageModels:
    """Group runs by model and seed. Those that were measured on different text, or in other windows, are refused."""
    done = [run for run in runs if run.status == "done" and any(measured(run, split) for split in ("test", "valid"))]
    left_out = [run.folder for run in runs if run not in done]
    if not done:
        raise ValueError(f"none of {len(runs)} run(s) of a language model is done; finish them with --resume")
    split = "test" if all(measured(run, "test") for run in done) else "valid"
    check_one(done, "texts", lambda run: run.lines[0]["corpus"]["sha256"][:12])
    for key in ("seq_len", "isolate_documents"):
        check_one(done, f"data.{key}", lambda run, key=key: run.settings["data"][key])  # type: ignore[misc]
    check_one(done, "numbers of measured tokens", lambda run: measured(run, split).get("tokens"))
    models: dict[str, dict[int, Run]] = {}
    for name, run in sorted(zip(names(done), done, strict=True), key=lambda pair: order(pair[0])):
        if run.seed in models.setdefault(name, {}):
            left_out.append(run.folder)
        else:
            models[name][run.seed] = run
    return LanguageModels(split, models, left_out)


def names(runs: Sequence[Run]) -> list[str]:
    """The paper's names, with what sets two models of one name apart."""
    kinds = [kind_of(run.settings["model"]) for run in runs]
    apart = tell_apart(kinds, [told(run) for run in runs], [()] * len(runs))
    return [str(ModelName(*name)) for name in zip(kinds, apart, strict=True)]


def told(run: Run) -> dict[str, Any]:
    leaves = flatten({"model": run.settings["model"], "train": run.settings["train"]})
    return {path: leaf for path, leaf in leaves.items() if path not in UNTOLD}


def trained_apart(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The settings of training in which the runs differ, with their values."""
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for path, leaf in told(run).items():
            if path.startswith("train."):
                found.setdefault(path, {})[str(leaf)] = None
    return {path.removeprefix("train."): list(values) for path, values in found.items() if len(values) > 1}


def order(name: str) -> tuple[int, str]:
    """As in the paper's table, others after them."""
    known = [place for place, paper in enumerate(TABLE_2) if name.split(" (")[0] == paper]
    return (known[0] if known else len(TABLE_2), name)


def steps(run: Run) -> list[dict[str, Any]]:
    return [line for line in run.lines if line["type"] == "step"]


def measured(run: Run, split: str) -> dict[str, Any]:
    """What the record's last line says of a split; empty where it says nothing, or no number."""
    found = run.lines[-1].get(split) or {}
    try:
        numbers = [found[part]["perplexity"] for part in PARTS] + [found["tokens"], found["ar_share"]]
        return found if all(isfinite(number) for number in numbers) and steps(run) else {}
    except (KeyError, TypeError):
        return {}


def check_one(runs: Sequence[Run], what: str, of: Callable[[Run], Any]) -> None:
    first: dict[Any, str] = {}
    for run in runs:
        first.setdefault(of(run), run.folder)
    if len(first) > 1:
        said = "; ".join(f"{value} in {folder}" for value, folder in first.items())
        raise ValueError(f"these runs have different {what}, so their perplexities cannot be compared: {said}")


def with_interval(values: Sequence[float], sign: str) -> str:
    """Their mean ± half of its interval, which one value does not have."""
    half = t_interval(values).high - fmean(values)
    return f"{fmean(values):{sign}.3f}" + ("" if isnan(half) else f" ± {half:.3f}")
