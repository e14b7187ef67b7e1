"""Table 2: losses of attention, Based and ReBased. Runs of other sizes or on another text are a stand-in."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from math import log, nan
from statistics import fmean

from rebased.analysis.unpaired import Effect
from rebased.config import grouped
from rebased.paper import mqar
from rebased.paper.answered import PLANS
from rebased.paper.counts import TABLE_9
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding, words_table
from rebased.paper.planned import JudgedPlan
from rebased.paper.reference import PAPER
from rebased.paper.values import TABLE_2, TABLE_2_TOKENS
from rebased.paper.verdict import Contest, Number, Outcome, Protocol, hold_claims
from rebased.report.lm.figures import styles_of, training_curves
from rebased.report.lm.models import PARTS, LanguageModels, group_language_models, is_finished, kind_in, passes, steps
from rebased.report.lm.page import CURVES
from rebased.report.page import details, figure, paragraphs
from rebased.report.tables import Table, number
from rebased.runs.finished import Run

BETTER = (  # (model with the lower loss in the paper, the other, part of the tokens)
    ("ReBased", "Based", "all"),
    ("ReBased", "Attention", "all"),
    ("ReBased", "Based", "ar"),
    ("Attention", "ReBased", "ar"),
    ("ReBased", "Based", "non_ar"),
    ("ReBased", "Attention", "non_ar"),
)
COUNTS = {cell.model: cell.parameters for cell in TABLE_9}
NO_MODELS = LanguageModels("test", {}, [])
MARGIN = 0.01  # nats per token: the paper's differences are 0.010 and 0.014 over all tokens


def find_perplexity(evidence: Evidence, planned: Mapping[str, JudgedPlan]) -> Finding:
    """Table 2, from the first group of `rank_groups`; the others, and those of plans, are shown below it."""
    groups = rank_groups(evidence.lm_runs)
    plans = [plan for name, plan in planned.items() if name in PLANS and PLANS[name].table == "Table 2"]
    others = [group for plan in plans for group in rank_groups(plan.runs)]
    if not groups:
        return Finding("Table 2", "none", hold_levels(NO_MODELS), hold_claims(contests(NO_MODELS)))
    chosen, departures = groups[0], departures_of(groups[0])
    own = all(is_papers_model(name, run) for name, runs in chosen.models.items() for run in runs.values())
    protocol: Protocol = "stand-in" if not own else "departs" if departures else "paper"
    return Finding(
        "Table 2",
        protocol,
        hold_levels(chosen if own else NO_MODELS),
        hold_claims(contests(chosen)),
        departures=departures,
        draw=partial(levels, [*groups, *others], [groups[0], *others]),
        remarks=[f"They overfit{label(chosen)}: gaps differ, not only what is learned."] * bool(chosen.overfitting),
        sources=mqar.sources(chosen.runs),
    )


def levels(groups: Sequence[LanguageModels], drawn: Sequence[LanguageModels]) -> str:
    """Losses and perplexities of all groups, means over seeds; curves of those that are drawn."""
    rows = []
    for group in groups:
        for model, runs in group.models.items():
            trained, tested = group.losses(model) or (nan, nan)
            means = (fmean(group.values(model, part).values()) for part in PARTS)
            cells = (number(value, ".2f") for value in (trained, tested, tested - trained, *means))
            rows.append((model, number(passes(next(iter(runs.values()))), ".1f"), str(len(runs)), *cells))
    head = ("mean over seeds", "passes", "seeds", "training loss", "test loss", "gap", "perplexity", "AR", "non-AR")
    pictures = [training_curves(group, styles_of([group]), f"table-2-curves-{n}") for n, group in enumerate(drawn)]
    curves = "".join(figure(each, label(group)[2:]) for each, group in zip(pictures, drawn, strict=True) if each)
    papers = "; ".join(f"{name} {' / '.join(map(str, values))}" for name, values in TABLE_2.items())
    html = words_table(Table(head, rows)) + paragraphs(f"The paper's perplexities: {papers}.")
    return html + (details("Show training curves", curves + paragraphs(CURVES)) if curves else "")


def label(group: LanguageModels) -> str:
    """', 5.9 passes', for statements; empty if that is not known."""
    count = passes(group.runs[0]) if group.models else None
    return f", {count:.1f} passes" if count else ""


def rank_groups(runs: Sequence[Run]) -> list[LanguageModels]:
    """Groups of ended runs that can be compared, the best first: most of the paper's models, then two seeds or more,
    then most training tokens."""
    by_tokens = grouped(filter(is_finished, runs), trained_on)
    groups = [group for alike in by_tokens.values() for group in group_language_models(alike, PAPER)]
    known = [group for group in groups if of_kind(group, "ReBased")]

    def rank(group: LanguageModels) -> tuple[int, bool, int]:
        names = [name for kind in TABLE_2 if (name := of_kind(group, kind))]
        can_be_tested = min(len(group.models[name]) for name in names) > 1
        return len(names), can_be_tested, trained_on(group.runs[0])

    return sorted(known, key=rank, reverse=True)


def of_kind(group: LanguageModels, kind: str, variant: str = "") -> str | None:
    """The name of a model of this kind: of this variant, or else the one with most seeds; None if there is none."""
    names = [name for name in group.models if kind_in(name) == kind]
    return max(names, key=lambda name: (name == f"{kind} ({variant})", len(group.models[name])), default=None)


def variants(group: LanguageModels) -> list[str]:
    """The settings in which models of ReBased differ, such as "key_width 16, n_heads 12", those with most seeds first;
    one empty text if there is one model."""
    names = [name for name in group.models if kind_in(name) == "ReBased"]
    names.sort(key=lambda name: -len(group.models[name]))
    return [name.removeprefix("ReBased").removeprefix(" (").removesuffix(")") for name in names]


def trained_on(run: Run) -> int:
    """The tokens that a run was trained on: what its end says, or else its last line about steps."""
    end, size = run.lines[-1].get("step"), run.settings["train"].get("batch_size")
    last = end if isinstance(end, int) else int(steps(run)[-1]["step"])
    return last * (size if isinstance(size, int) else 0) * int(run.settings["data"]["seq_len"])


def is_papers_model(name: str, run: Run) -> bool:
    """Whether a run's model has the paper's size and sequences."""
    return run.parameters == COUNTS.get(kind_in(name)) and run.settings["data"]["seq_len"] == 4096


def departures_of(chosen: LanguageModels) -> list[str]:
    """In what the runs differ from the paper's, in words."""
    run, found = chosen.runs[0], []
    text = str(run.settings["data"]["folder"]).rsplit("/", 1)[-1]
    if "pile" not in text.lower():
        found.append(f"{text} instead of the Pile")
    if any(run.parameters != COUNTS.get(kind_in(name)) for name, of in chosen.models.items() for run in of.values()):
        sizes = mqar.span([round(run.parameters / 1e6) for run in chosen.runs])
        found.append(f"models of {sizes} million parameters instead of 127 to 157")
    if (tokens := trained_on(run)) != TABLE_2_TOKENS:
        times = f", {count:.1f} passes over the text" if (count := passes(run)) else ""
        ours, papers = f"{tokens / 1e6:,.0f} million", f"{TABLE_2_TOKENS / 1e9:.0f} billion"
        found.append(f"{ours} training tokens{times} instead of {papers}")
    return found


def hold_levels(chosen: LanguageModels) -> list[Number]:
    """The paper's nine perplexities beside ours, which are None for a stand-in. The paper has no spread."""
    numbers = []
    for model, values in TABLE_2.items():
        name = of_kind(chosen, model)
        for (part, words), value in zip(PARTS.items(), values, strict=True):
            number = Number(f"{model}, {words} tokens", f"{value:.2f}")
            if ours := list(chosen.values(name, part).values()) if name else []:
                mean = sum(ours) / len(ours)
                outcome: Outcome = "agrees" if abs(log(mean / value)) < MARGIN else "differs"
                number = Number(*number[:2], f"{mean:.2f}", mean - value, seeds=len(ours), outcome=outcome)
            numbers.append(number)
    return numbers


def contests(chosen: LanguageModels) -> list[Contest]:
    """The signs of the paper's six differences in loss, for each variant of ReBased. The loss of the model that is
    worse in the paper comes first."""
    found = []
    for variant, (better, worse, part) in product(variants(chosen) or [""], BETTER):
        of_which = f" with {variant}" if variant else ""
        what = f"{PARTS[part]} tokens{label(chosen)}{of_which}: {better} has a lower loss than {worse}"
        names = [name for kind in (worse, better) if (name := of_kind(chosen, kind, variant))]
        sides = [{seed: log(value) for seed, value in chosen.values(name, part).items()} for name in names]
        column = list(PARTS).index(part)
        paper = Effect(log(TABLE_2[worse][column] / TABLE_2[better][column]), 0, 1, 1, 1)
        ours, others = sides if len(sides) == 2 else (None, None)
        found.append(Contest(what, ours, others, paper, MARGIN, "nats", (better, worse)))
    return found
