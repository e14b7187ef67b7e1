"""Table 2: perplexity of attention, Based and ReBased. Runs of other sizes or on another text are a stand-in."""

from collections.abc import Sequence
from functools import partial

from rebased.analysis import describe
from rebased.config import plural
from rebased.paper import mqar
from rebased.paper.contents import BY_NAME
from rebased.paper.cost import TABLE_2_TOKENS, Cost, Speeds
from rebased.paper.counts import TABLE_9
from rebased.paper.evidence import Evidence
from rebased.paper.finding import Finding
from rebased.paper.mqar import Pair
from rebased.paper.reference import PAPER
from rebased.paper.values import TABLE_2, printed
from rebased.paper.verdict import Number, Protocol, hold_number
from rebased.report.lm import narrative
from rebased.report.lm.figures import perplexity_by_distance, styles_of
from rebased.report.lm.models import PARTS, LanguageModels, group_language_models, is_finished, kind_in, steps
from rebased.report.lm.page import BY_DISTANCE
from rebased.report.lm.tables import distance_table, perplexity_table, with_sd
from rebased.report.page import details, figure, paragraphs
from rebased.report.tables import Table
from rebased.runs.finished import Run

BETTER = (  # (model with the lower perplexity in the paper, the other, part of the tokens)
    *(("ReBased", "Based", part) for part in PARTS),
    ("ReBased", "Attention", "all"),
    ("Attention", "ReBased", "ar"),
    ("ReBased", "Attention", "non_ar"),
)
COUNTS = {cell.model: cell.parameters for cell in TABLE_9}


def find_perplexity(evidence: Evidence) -> Finding:
    """Table 2, from the first group of `rank_groups`; the others are shown below it."""
    item, cost = BY_NAME["Table 2"], cost_of(evidence.speeds)
    groups = rank_groups(evidence.lm_runs)
    if not groups:
        return Finding(item, "none", hold_levels(None), mqar.hold_claims(pairs(None)), cost=cost)
    chosen = groups[0]
    departures = departures_of(chosen)
    own = all(is_papers_model(name, run) for name, runs in chosen.models.items() for run in runs.values())
    protocol: Protocol = "stand-in" if not own else "departs" if departures else "paper"
    seeds = [len(runs) for runs in chosen.models.values()]
    remarks = [
        "Levels of perplexity are not compared: text, training and size are others. The table shows them beside the "
        "paper's. The signs of differences are claims and are tested, but a stand-in decides nothing about the paper."
    ]
    return Finding(
        item,
        protocol,
        hold_levels(chosen if own else None),
        mqar.hold_claims(pairs(chosen)),
        departures=departures,
        settings=settings_table(chosen),
        draw=partial(levels, groups),
        remarks=remarks if not own else [],
        seeds=mqar.span(seeds),
        sources=mqar.sources(chosen.runs),
        cost=cost,
    )


def levels(groups: Sequence[LanguageModels]) -> str:
    """A table of perplexities beside the paper's, of each group; of the first also AR tokens by distance."""
    tables = []
    for group in groups:
        tokens = f"{trained_on(group.runs[0]) / 1e6:,.0f} million tokens"
        words = f"Perplexity after {tokens}, mean ± sd over seeds: {group.data}."
        tables.append(perplexity_table(group).to_html() + paragraphs(words))
    first, *others = tables
    rest = details(f"Show {plural(len(others), 'other group')} of runs", "".join(others)) if others else ""
    return first + distances(groups[0]) + rest


def distances(group: LanguageModels) -> str:
    """Perplexity of AR tokens by distance, drawn and in numbers; empty if no record has it."""
    picture = perplexity_by_distance(group, styles_of([group]), "table-2-by-distance")
    table = distance_table(group, with_sd)
    if picture is None or table is None:
        return ""
    return figure(picture, f"{narrative.BY_DISTANCE} {BY_DISTANCE}") + details("Show the numbers", table.to_html())


def rank_groups(runs: Sequence[Run]) -> list[LanguageModels]:
    """Groups of ended runs that may stand side by side: first those with most of the paper's models, of these the ones
    with two seeds or more, of these the ones that were trained on most tokens."""
    by_tokens: dict[int, list[Run]] = {}
    for run in runs:
        if is_finished(run):
            by_tokens.setdefault(trained_on(run), []).append(run)
    groups = [group for alike in by_tokens.values() for group in group_language_models(alike, PAPER)]
    known = [group for group in groups if of_kind(group, "ReBased")]

    def rank(group: LanguageModels) -> tuple[int, bool, int]:
        names = [name for kind in TABLE_2 if (name := of_kind(group, kind))]
        can_be_tested = min(len(group.models[name]) for name in names) > 1
        return models_in(group), can_be_tested, trained_on(group.runs[0])

    return sorted(known, key=rank, reverse=True)


def models_in(group: LanguageModels) -> int:
    """How many of the paper's three models it has."""
    return sum(of_kind(group, kind) is not None for kind in TABLE_2)


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
    """The tokens that a run was trained on."""
    return steps_of(run) * batch_of(run) * int(run.settings["data"]["seq_len"])


def steps_of(run: Run) -> int:
    """Its training steps: what its end says, or else its last line about steps."""
    end = run.lines[-1].get("step")
    return end if isinstance(end, int) else int(steps(run)[-1]["step"])


def batch_of(run: Run) -> int:
    """Sequences per step; 0 if the record does not say."""
    size = run.settings["train"].get("batch_size")
    return size if isinstance(size, int) else 0


def is_papers_model(name: str, run: Run) -> bool:
    """Whether a run's model has the paper's size and sequences."""
    return run.parameters == COUNTS.get(kind_in(name)) and run.settings["data"]["seq_len"] == 4096


def departures_of(chosen: LanguageModels) -> list[str]:
    """In what the runs differ from the paper's, in words."""
    run, found = chosen.runs[0], []
    text = str(run.settings["data"]["folder"]).rsplit("/", 1)[-1]
    if "pile" not in text.lower():
        found.append(f"{text} instead of the Pile")
    if any(
        run.parameters != COUNTS.get(kind_in(name)) for name, runs in chosen.models.items() for run in runs.values()
    ):
        sizes = mqar.span([round(run.parameters / 1e6) for run in chosen.runs])
        found.append(f"models of {sizes} million parameters instead of 127 to 157")
    tokens = trained_on(run)
    if tokens != TABLE_2_TOKENS:
        found.append(f"{tokens / 1e6:,.0f} million training tokens instead of {TABLE_2_TOKENS / 1e9:.0f} billion")
    return found


def hold_levels(chosen: LanguageModels | None) -> list[Number]:
    """The paper's nine perplexities beside ours, which are None for a stand-in."""
    numbers = []
    for model, values in TABLE_2.items():
        name = of_kind(chosen, model) if chosen else None
        for (part, words), value in zip(PARTS.items(), values, strict=True):
            ours = describe(list(chosen.values(name, part).values())) if chosen and name else None
            numbers.append(hold_number(f"{model}, {words} tokens", printed(value), ours, digits=2))
    return numbers


def pairs(chosen: LanguageModels | None) -> list[Pair]:
    """The signs of the paper's six differences, for each variant of ReBased. The perplexity of the model that is worse
    in the paper comes first."""
    found: list[Pair] = []
    for variant in variants(chosen) if chosen else [""]:
        for better, worse, part in BETTER:
            of_which = f" with {variant}" if variant else ""
            what = f"{PARTS[part]} tokens{of_which}: {better} has a lower perplexity than {worse}"
            names = [of_kind(chosen, kind, variant) for kind in (worse, better)] if chosen else []
            if chosen and names[0] and names[1]:
                found.append((what, chosen.values(names[0], part), chosen.values(names[1], part)))
            else:
                found.append((what, None, None))
    return found


def settings_table(chosen: LanguageModels) -> Table:
    """The paper's protocol beside that of the runs."""
    run = chosen.runs[0]
    train, sizes = run.settings["train"], sorted({run.parameters for run in chosen.runs})
    rows = [
        ("text", "the Pile", f"{str(run.settings['data']['folder']).rsplit('/', 1)[-1]}"),
        ("parameters", ", ".join(f"{count:,}" for count in COUNTS.values()), ", ".join(f"{size:,}" for size in sizes)),
        ("tokens per sequence", "4,096", f"{run.settings['data']['seq_len']:,}"),
        ("sequences per step", "1,024", f"{batch_of(run):,}"),
        ("steps", "20,000", f"{steps_of(run):,}"),
        ("training tokens", f"{TABLE_2_TOKENS:,}", f"{trained_on(run):,}"),
        ("learning rate, warm-up steps", "0.001, 200", f"{train.get('lr', '?')}, {train.get('warmup_steps', '?')}"),
        ("seeds", "not stated", mqar.span([len(runs) for runs in chosen.models.values()])),
    ]
    return Table(("", "paper", "here"), rows)


def cost_of(speeds: Speeds) -> Cost:
    """What the paper's three models would cost."""
    each = {"attention": 1, "paper-text": 2}
    minutes = sum(n * TABLE_2_TOKENS / speeds.tokens_per_second(model) / 60 for model, n in each.items())
    what = (
        f"The paper's three models once, {TABLE_2_TOKENS / 1e9:.0f} billion tokens of the Pile each (Based and ReBased "
        "at the speed of 12 heads of 16)"
    )
    return Cost(minutes, what, speeds.records[-1:])
